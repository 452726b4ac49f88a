"""Which cache blocks each request owns, and the slot of every token to be written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """Block ids of the held requests, in order.

    Rows are those of RequestStates. Ids only get appended: blocks that a sliding window left behind stay listed,
    because attention does not read them. version changes whenever a row does.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._block_ids: NDArray[np.int32] = np.zeros((max_num_reqs, max_num_blocks), dtype=np.int32)
        self._flat_block_ids = self._block_ids.reshape(-1)
        self._num_blocks = [0] * max_num_reqs
        self.max_num_blocks = max_num_blocks
        self.version = 0

    def set_blocks(self, req_index: int, block_ids: list[int]) -> None:
        """Start a row with the blocks of a new or resumed request."""
        self._num_blocks[req_index] = 0
        self.append_blocks(req_index, block_ids)

    def append_blocks(self, req_index: int, block_ids: list[int]) -> None:
        """Add blocks to the end of a row."""
        start = self._num_blocks[req_index]
        end = start + len(block_ids)
        assert end <= self._block_ids.shape[1], f"{end} blocks exceed the {self._block_ids.shape[1]} of max_model_len"
        self._block_ids[req_index, start:end] = block_ids
        self._num_blocks[req_index] = end
        self.version += 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Give how many blocks that many tokens fill."""
        return -(-num_tokens // self.block_size)

    def gather(self, req_indices: NDArray[np.intp], num_blocks: int, out: NDArray[np.int32]) -> NDArray[np.int32]:
        """Copy the first num_blocks of each row of a batch to out, a flat buffer, and give them as a table."""
        table = out[: len(req_indices) * num_blocks].reshape(len(req_indices), num_blocks)
        np.take(self._block_ids[:, :num_blocks], req_indices, axis=0, out=table, mode="clip")
        return table

    def fill_slots(self, row_starts: NDArray[np.int64], positions: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Write the slot of each token to out: block id times block size, plus the offset in the block.

        row_starts [num_tokens] is the token's row times max_num_blocks, positions its index in its request.
        """
        blocks, offsets = np.divmod(positions, self.block_size)
        blocks += row_starts
        np.multiply(self._flat_block_ids.take(blocks), self.block_size, out=out)
        out += offsets
