"""Runs a decoder's layers by one call of the library a step."""

import ctypes

import torch
from torch import Tensor

from serve.kernels import checks
from serve.kernels.cpu import binding, descriptions, faults
from serve.kernels.kv_cache import AttentionMetadata, KVCache
from serve.kernels.packed_weight import PACKED_TYPES, PackedWeight
from serve.kernels.quantized_weight import QuantizedWeight
from serve.kernels.stack import LinearParts, Stack, StackLayer

_MIN_CAPACITY = 64


class CpuStack:
    """A plan made once, and the working memory and structures that its steps use again."""

    def __init__(self, stack: Stack) -> None:
        """Describe the stack to the library; ValueError for parts that do not fit each other."""
        self._library = binding.library()
        self._stack = stack  # the plan holds bare addresses
        self._hidden_size = stack.norm.shape[0]
        self._layers = (descriptions.LayerPlan * len(stack.layers))(*(_describe_layer(stack, x) for x in stack.layers))
        self._plan = _describe_stack(stack, self._layers)
        if self._library.serve_check_stack(ctypes.addressof(self._plan)) != binding.OK:
            raise ValueError(f"the sizes of {len(stack.layers)} layers do not fit hidden_size={self._hidden_size}")
        self._head = _describe_linear(stack.head)
        self._head_row_bytes = self._library.serve_quantized_row_bytes(stack.head.num_in, self._head.activations)
        self._step = descriptions.StepInputs()
        self._fault = binding.Fault()
        self._kv_caches: list[KVCache] | None = None
        self._cache_descriptions: ctypes.Array[descriptions.CacheDescription] | None = None
        self._capacity = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        *,
        embeds: tuple[Tensor, Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run a step; see StackRunner."""
        num_tokens = meta.num_tokens
        _check_inputs(input_ids, positions, meta)
        self._reserve(num_tokens)
        step = self._step
        step.input_ids = input_ids.data_ptr()
        step.positions = positions.data_ptr()
        step.batch = descriptions.describe_batch(meta)
        if kv_caches is not self._kv_caches:
            self._describe_caches(kv_caches)
        self._set_embeds(embeds)
        if rows is None:
            num_rows = num_tokens
            step.rows = None
        else:
            _check_rows("rows", rows)
            num_rows = rows.shape[0]
            step.rows = rows.data_ptr()
        step.num_rows = num_rows
        hidden_states = torch.empty((num_rows, self._hidden_size))
        step.hidden_states = hidden_states.data_ptr()
        fault = self._fault
        status = self._library.serve_run_stack(
            ctypes.addressof(self._plan), ctypes.addressof(step), ctypes.addressof(fault)
        )
        if status != binding.OK:
            raise self._error(int(status), meta)
        return hidden_states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Score the vocabulary; see StackRunner."""
        num_rows, size = hidden_states.shape
        if size != self._hidden_size or hidden_states.dtype != torch.float32 or hidden_states.stride(1) != 1:
            raise ValueError(f"hidden_states {checks.describe(hidden_states)} must be float32 [n, {self._hidden_size}]")
        # int64: the integers and floats inside need alignment.
        codes = torch.empty(num_rows * self._head_row_bytes // 8, dtype=torch.int64)
        out = torch.empty((num_rows, self._stack.head.num_out))
        status = self._library.serve_linear_layer(
            ctypes.addressof(self._head),
            hidden_states.data_ptr(),
            hidden_states.stride(0),
            num_rows,
            codes.data_ptr(),
            out.data_ptr(),
        )
        assert status == binding.OK, f"status {status} for a head that was checked"
        return out

    def _reserve(self, num_tokens: int) -> None:
        """Keep working memory for the largest step so far; the system gives pages as they are used."""
        if num_tokens <= self._capacity:
            return
        capacity = max(_MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())
        num_bytes = self._library.serve_stack_scratch_bytes(ctypes.addressof(self._plan), capacity)
        # What is refused here must leave the capacity as it was: the library writes as far as that says.
        self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        self._step.scratch = self._scratch.data_ptr()
        self._capacity = capacity

    def _describe_caches(self, kv_caches: list[KVCache]) -> None:
        if len(kv_caches) != len(self._stack.layers):
            raise ValueError(f"{len(kv_caches)} caches do not fit {len(self._stack.layers)} layers; give one for each")
        described = [descriptions.describe_cache(cache) for cache in kv_caches]
        self._cache_descriptions = (descriptions.CacheDescription * len(described))(*described)
        self._step.caches = self._cache_descriptions
        self._kv_caches = kv_caches

    def _set_embeds(self, embeds: tuple[Tensor, Tensor] | None) -> None:
        step = self._step
        if embeds is None:
            step.num_embeds = 0
            return
        tokens, values = embeds
        _check_rows("the tokens of embeds", tokens)
        if values.shape != (tokens.shape[0], self._hidden_size) or not _is_plain_float(values):
            raise ValueError(
                f"embeds {checks.describe(values)} must be contiguous float32 [{tokens.shape[0]}, {self._hidden_size}]"
            )
        step.num_embeds = tokens.shape[0]
        step.embed_rows = tokens.data_ptr()
        step.embeds = values.data_ptr()

    def _error(self, status: int, meta: AttentionMetadata) -> Exception:
        """Say what the library refused."""
        fault = self._fault
        if status == binding.BAD_TOKEN:
            return checks.token_error(fault.a, fault.b, int(self._plan.embedding.num_rows))
        if status == binding.BAD_POSITION:
            return checks.position_error(fault.a, fault.b, self._stack.cos_sin.shape[0])
        if status == binding.BAD_ROW:
            return checks.row_error(fault.a, fault.b, meta.num_tokens)
        assert self._kv_caches is not None, "caches are described before the call"
        return faults.batch_error(status, fault, self._kv_caches[0], meta)


def _describe_stack(stack: Stack, layers: ctypes.Array[descriptions.LayerPlan]) -> descriptions.StackPlan:
    max_position, rotary_size = stack.cos_sin.shape
    return descriptions.StackPlan(
        embedding=_describe_embedding(stack.embedding),
        layers=layers,
        norm=stack.norm.data_ptr(),
        cos_sin=stack.cos_sin.data_ptr(),
        num_layers=len(stack.layers),
        hidden_size=stack.norm.shape[0],
        inner_size=stack.layers[0].down.num_in,
        max_position=max_position,
        num_heads=stack.num_heads,
        num_kv_heads=stack.num_kv_heads,
        head_size=stack.head_size,
        rotary_size=rotary_size,
        eps=stack.eps,
    )


def _describe_embedding(weight: Tensor | PackedWeight | QuantizedWeight) -> descriptions.EmbeddingPlan:
    if isinstance(weight, QuantizedWeight):
        kind, number, address, num_rows = (
            descriptions.QUANTIZED_ROWS,
            weight.format.number,
            weight.data.data_ptr(),
            weight.num_out,
        )
        return descriptions.EmbeddingPlan(kind, number, address, num_rows)
    if isinstance(weight, PackedWeight):
        kind, number = descriptions.PACKED_ROWS, weight.type_number
        return descriptions.EmbeddingPlan(kind, number, weight.data.data_ptr(), weight.num_out)
    kind, number = descriptions.PLAIN_ROWS, PACKED_TYPES[weight.dtype]
    return descriptions.EmbeddingPlan(kind, number, weight.data_ptr(), weight.shape[0])


def _describe_layer(stack: Stack, layer: StackLayer) -> descriptions.LayerPlan:
    return descriptions.LayerPlan(
        input_norm=layer.input_norm.data_ptr(),
        post_attention_norm=layer.post_attention_norm.data_ptr(),
        query_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
        key_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
        qkv=_describe_linear(layer.qkv),
        out=_describe_linear(layer.out),
        gate_up=_describe_linear(layer.gate_up),
        down=_describe_linear(layer.down),
        attention=descriptions.AttentionOptions(scale=stack.scale, window=checks.window_size(layer.window)),
    )


def _describe_linear(layer: LinearParts) -> descriptions.LinearLayer:
    parts = (descriptions.LinearPart * len(layer.weights))()
    first = 0
    for part, weight in zip(parts, layer.weights, strict=True):
        if isinstance(weight, QuantizedWeight):
            part.kind, part.type = descriptions.QUANTIZED, weight.format.number
        else:
            part.kind, part.type = descriptions.DENSE, weight.type_number
        part.weight = weight.data.data_ptr()
        part.bias = None if layer.bias is None else layer.bias.data_ptr() + first * 4
        part.num_out = weight.num_out
        first += weight.num_out
    return descriptions.LinearLayer(parts, len(parts), layer.num_in, int(layer.int8_activations))


def build_stack(stack: Stack) -> CpuStack | None:
    """Make a runner, or None for tensors that the library does not take as they are."""
    tensors: list[Tensor | None] = [stack.norm, stack.cos_sin]
    linears = [stack.head]
    for layer in stack.layers:
        tensors += [layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm]
        linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
    tensors += [linear.bias for linear in linears]
    embedding = stack.embedding
    if isinstance(embedding, Tensor) and not (embedding.dtype in PACKED_TYPES and embedding.is_contiguous()):
        return None
    # The library reads the columns of an embedding row, and the inputs of a product, as they lie.
    if isinstance(embedding, QuantizedWeight) and embedding.input_order is not None:
        return None
    if any(_reorders_inputs(linear) for linear in linears):
        return None
    return CpuStack(stack) if all(x is None or _is_plain_float(x) for x in tensors) else None


def _reorders_inputs(layer: LinearParts) -> bool:
    return any(isinstance(weight, QuantizedWeight) and weight.input_order is not None for weight in layer.weights)


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _check_inputs(input_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> None:
    """Check shapes and types, which the library cannot see."""
    num_tokens = meta.num_tokens
    _check_vector("input_ids", input_ids, torch.int32, num_tokens)
    _check_vector("positions", positions, torch.int64, num_tokens)
    _check_vector("slot_mapping", meta.slot_mapping, torch.int64, num_tokens)
    checks.check_metadata(meta)


def _check_vector(name: str, vector: Tensor, dtype: torch.dtype, min_size: int) -> None:
    if vector.dtype != dtype or vector.dim() != 1 or vector.shape[0] < min_size or not vector.is_contiguous():
        raise ValueError(
            f"{name} {checks.describe(vector)} must be contiguous {dtype} with at least {min_size} entries"
        )


def _check_rows(name: str, rows: Tensor) -> None:
    _check_vector(name, rows, torch.int64, 0)
