"""A decoder by one call: the bits of the single ops, for every mix of layers, batches and threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from serve.kernels import ops as public_ops
from serve.kernels import reference
from serve.kernels.kv_cache import KVCache
from serve.kernels.ops import Ops
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import QuantizedWeight
from serve.kernels.stack import LinearParts, Stack, StackLayer, StackRunner
from tests.kernels.paged import CACHE_DTYPES, Batch, Heads, make_batch
from tests.kernels.test_quantized_linear import random_blocks

VOCAB, HIDDEN, INNER, EPS = 131, 256, 512, 1e-5
HEADS = Heads(6, 2, 128)
HEAD_OUTPUTS = HEADS.num_heads * HEADS.head_size
QKV = (HEAD_OUTPUTS, 256, 256)
# What the projections of a layer are made of, by part.
FORMS = {
    "dense": (("F32", "F32", "F32"), "F32", ("F32", "F32"), "F32"),
    "dense of half precision": (("BF16", "BF16", "F16"), "F16", ("BF16", "F32"), "BF16"),
    "one type": (("Q4_1", "Q4_1", "Q4_1"), "Q4_1", ("Q4_1", "Q4_1"), "Q4_1"),
    "types mixed": (("Q4_K", "Q4_K", "Q6_K"), "Q5_0", ("Q3_K", "Q8_0"), "Q6_K"),
    "dense beside quantised": (("Q4_0", "F32", "Q5_1"), "F32", ("F32", "Q2_K"), "Q5_K"),
}
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
QUERY_LENS, SEQ_LENS = [1, 33, 1, 40], [300, 70, 3, 40]


@dataclasses.dataclass
class Case:
    """A stack, a step for it, and what the step reads besides."""

    stack: Stack
    batch: Batch
    caches: list[KVCache]
    input_ids: Tensor
    positions: Tensor

    def fresh_caches(self) -> list[KVCache]:
        return [dataclasses.replace(c, key=c.key.clone(), value=c.value.clone()) for c in self.caches]


def weight(ops: Ops, kind: str, num_out: int, num_in: int) -> PackedWeight | QuantizedWeight:
    if kind in FLOATS:
        return ops.pack_linear((torch.randn(num_out, num_in) * num_in**-0.5).to(FLOATS[kind]))
    return ops.pack_quantized(random_blocks(kind, num_out, num_in))


def parts(ops: Ops, kinds: tuple[str, ...], sizes: tuple[int, ...], num_in: int, bias: bool = False) -> LinearParts:
    weights = tuple(weight(ops, kind, size, num_in) for kind, size in zip(kinds, sizes, strict=True))
    return LinearParts(weights, torch.randn(sum(sizes)) if bias else None)


def make_layer(ops: Ops, form: str, *, bias: bool, head_norms: bool, window: int | None) -> StackLayer:
    qkv, out, gate_up, down = FORMS[form]
    return StackLayer(
        input_norm=torch.rand(HIDDEN) + 0.5,
        post_attention_norm=torch.rand(HIDDEN) + 0.5,
        q_norm=torch.rand(HEADS.head_size) + 0.5 if head_norms else None,
        k_norm=torch.rand(HEADS.head_size) + 0.5 if head_norms else None,
        qkv=parts(ops, qkv, QKV, HIDDEN, bias),
        out=parts(ops, (out,), (HIDDEN,), HEAD_OUTPUTS, bias),
        gate_up=parts(ops, gate_up, (INNER, INNER), HIDDEN, bias),
        down=parts(ops, (down,), (HIDDEN,), INNER, bias),
        window=window,
    )


def make_case(ops: Ops, layers: list[StackLayer], *, embedding: str = "plain F32", dtype: torch.dtype) -> Case:
    form, kind = embedding.split()
    head = parts(ops, (kind,), (VOCAB,), HIDDEN)
    batch = make_batch(QUERY_LENS, SEQ_LENS, HEADS, dtype=dtype)
    stack = Stack(
        embedding=torch.randn(VOCAB, HIDDEN).to(FLOATS[kind]) if form == "plain" else head.weights[0],
        layers=tuple(layers),
        norm=torch.rand(HIDDEN) + 0.5,
        head=head,
        cos_sin=torch.randn(SEQ_LENS[0], HEADS.head_size),
        num_heads=HEADS.num_heads,
        num_kv_heads=HEADS.num_kv_heads,
        head_size=HEADS.head_size,
        scale=HEADS.scale,
        eps=EPS,
    )
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(QUERY_LENS, SEQ_LENS, strict=True)])
    batch.meta.slot_mapping = new_slots(batch, positions)
    caches = [dataclasses.replace(batch.cache, key=batch.cache.key.clone(), value=batch.cache.value.clone())]
    caches += [caches[0]] * (len(layers) - 1)
    return Case(stack, batch, caches, torch.randint(0, VOCAB, (sum(QUERY_LENS),), dtype=torch.int32), positions)


def new_slots(batch: Batch, positions: Tensor) -> Tensor:
    size = batch.cache.block_size
    requests = torch.repeat_interleave(torch.arange(len(QUERY_LENS)), torch.tensor(QUERY_LENS))
    return batch.meta.block_table[requests, positions // size].long() * size + positions % size


def product(ops: Ops, x: Tensor, layer: LinearParts) -> Tensor:
    outputs, first = [], 0
    for part in layer.weights:
        bias = None if layer.bias is None else layer.bias[first : first + part.num_out]
        is_dense = isinstance(part, PackedWeight)
        int8 = layer.int8_activations
        outputs.append(
            ops.linear(x, part, bias) if is_dense else ops.linear_quantized(x, [part], bias, int8_activations=int8)
        )
        first += part.num_out
    return torch.cat(outputs, dim=1)


def op_by_op(ops: Ops, case: Case, caches: list[KVCache], given: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Compute hidden states with the single ops."""
    stack, meta = case.stack, case.batch.meta
    ids = case.input_ids.long()
    embedding = stack.embedding if isinstance(stack.embedding, Tensor) else stack.embedding.plain()
    residual = embedding[ids].float()
    if given is not None:
        residual[given[0]] = given[1]
    update = torch.zeros_like(residual)
    for layer, cache in zip(stack.layers, caches, strict=True):
        x = ops.add_rms_norm(update, residual, layer.input_norm, EPS)
        heads = product(ops, x, layer.qkv).view(len(ids), -1, HEADS.head_size)
        query, key, value = heads.split((HEADS.num_heads, HEADS.num_kv_heads, HEADS.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            ops.rms_norm(query, layer.q_norm, EPS, out=query)
            ops.rms_norm(key, layer.k_norm, EPS, out=key)
        ops.rope_(case.positions, query, key, stack.cos_sin)
        ops.kv_write(key, value, cache, meta.slot_mapping)
        attended = torch.empty(query.shape)
        ops.paged_attention(query, cache, meta, attended, scale=stack.scale, window=layer.window)
        update = product(ops, attended.view(len(ids), -1), layer.out)
        x = ops.add_rms_norm(update, residual, layer.post_attention_norm, EPS)
        update = product(ops, ops.silu_and_mul(product(ops, x, layer.gate_up)), layer.down)
    return ops.add_rms_norm(update, residual, stack.norm, EPS)


def runner_of(ops: Ops, case: Case) -> StackRunner:
    runner = ops.stack(case.stack)
    assert runner is not None
    return runner


def forward(
    runner: StackRunner, case: Case, caches: list[KVCache], *, rows: Tensor | None = None, ids: Tensor | None = None
) -> Tensor:
    return runner.forward(case.input_ids if ids is None else ids, case.positions, caches, case.batch.meta, rows=rows)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_bits(actual: list[KVCache], expected: list[KVCache]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(bits(a.key), bits(e.key))
        assert torch.equal(bits(a.value), bits(e.value))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "biases, norms of heads, windows"])
def test_one_call_gives_the_bits_of_the_single_ops(
    library_ops: Ops, form: str, is_plain: bool, threads_restored: None
) -> None:
    torch.manual_seed(len(form))
    extra = [(False, False, None)] * 2 if is_plain else [(True, True, 25), (True, True, None), (False, True, 290)]
    layers = [make_layer(library_ops, form, bias=b, head_norms=n, window=w) for b, n, w in extra]
    case = make_case(library_ops, layers, dtype=CACHE_DTYPES[len(form) % 3])
    expected_caches = case.fresh_caches()
    expected = op_by_op(library_ops, case, expected_caches)
    assert expected.isfinite().all()
    runner = runner_of(library_ops, case)
    for num_threads in (1, 3):
        public_ops.set_num_threads(num_threads)
        caches = case.fresh_caches()
        assert torch.equal(forward(runner, case, caches), expected)
        assert_same_bits(caches, expected_caches)
    assert torch.equal(runner.logits(expected[2:9]), product(library_ops, expected[2:9], case.stack.head))


@pytest.mark.parametrize("form", ["one type", "types mixed", "dense beside quantised"])
def test_int8_activations_and_keys_give_the_bits_of_the_single_ops(library_ops: Ops, form: str) -> None:
    torch.manual_seed(4)
    layer = make_layer(library_ops, form, bias=True, head_norms=True, window=25)

    def int8(linear: LinearParts) -> LinearParts:
        return dataclasses.replace(linear, int8_activations=True)

    layer = dataclasses.replace(
        layer, qkv=int8(layer.qkv), out=int8(layer.out), gate_up=int8(layer.gate_up), down=int8(layer.down)
    )
    case = make_case(library_ops, [layer], dtype=torch.int8)
    expected_caches, caches = case.fresh_caches(), case.fresh_caches()
    expected = op_by_op(library_ops, case, expected_caches)
    assert torch.equal(forward(runner_of(library_ops, case), case, caches), expected)
    assert torch.equal(caches[0].key, expected_caches[0].key)
    assert torch.equal(caches[0].value, expected_caches[0].value)


def test_working_memory_that_is_refused_is_asked_for_again(library_ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(library_ops, "one type", bias=False, head_norms=False, window=None)
    case = make_case(library_ops, [layer], dtype=torch.float32)
    runner, reserve = runner_of(library_ops, case), torch.empty
    expected = op_by_op(library_ops, case, case.fresh_caches())
    refusals = [MemoryError("no memory")]

    def refuse_once(*size: object, **options: object) -> Tensor:
        if options.get("dtype") is torch.uint8 and refusals:
            raise refusals.pop()
        return reserve(*size, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", refuse_once)
    with pytest.raises(MemoryError):
        forward(runner, case, case.fresh_caches())
    assert torch.equal(forward(runner, case, case.fresh_caches()), expected)


@pytest.mark.parametrize("rows", [[], [74], [0, 33, 34, 74], [74, 1, 1, 40]])
def test_wanted_rows_are_those_of_the_whole(library_ops: Ops, rows: list[int]) -> None:
    torch.manual_seed(1)
    layers = [make_layer(library_ops, form, bias=True, head_norms=False, window=None) for form in FORMS]
    case = make_case(library_ops, layers, dtype=torch.float32)
    runner, all_caches, caches = runner_of(library_ops, case), case.fresh_caches(), case.fresh_caches()
    whole = forward(runner, case, all_caches)
    wanted = torch.tensor(rows, dtype=torch.int64)
    assert torch.equal(forward(runner, case, caches, rows=wanted), whole[wanted])
    assert_same_bits(caches, all_caches)


@pytest.mark.parametrize(
    "embedding",
    ["plain F32", "plain BF16", "plain F16", "packed F32", "packed BF16", "packed F16", "quantized Q8_0"],
)
def test_embedding_may_be_given_row_by_row(library_ops: Ops, embedding: str) -> None:
    torch.manual_seed(2)
    layers = [make_layer(library_ops, "one type", bias=False, head_norms=False, window=None)]
    case = make_case(library_ops, layers, embedding=embedding, dtype=torch.float32)
    given = (torch.tensor([3, 74, 0]), torch.randn(3, HIDDEN))
    expected = op_by_op(library_ops, case, case.fresh_caches(), given)
    runner = runner_of(library_ops, case)
    actual = runner.forward(case.input_ids, case.positions, case.fresh_caches(), case.batch.meta, embeds=given)
    assert torch.equal(actual, expected)
    looked_up = op_by_op(library_ops, case, case.fresh_caches())
    assert torch.equal(forward(runner, case, case.fresh_caches()), looked_up)


def test_refused_step_leaves_the_caches_as_they_were(library_ops: Ops) -> None:
    torch.manual_seed(3)
    layers = [make_layer(library_ops, "one type", bias=False, head_norms=False, window=None)]
    case = make_case(library_ops, layers, dtype=torch.float32)
    runner, caches = runner_of(library_ops, case), case.fresh_caches()
    meta = case.batch.meta
    num_slots = case.batch.cache.num_blocks * case.batch.cache.block_size

    def changed(tensor: Tensor, at: int, value: int) -> Tensor:
        other = tensor.clone()
        other.view(-1)[at] = value
        return other

    refused = {
        r"input_ids\[5\]=131 is outside the vocabulary": {"input_ids": changed(case.input_ids, 5, VOCAB)},
        r"input_ids\[0\]=-1 ": {"input_ids": changed(case.input_ids, 0, -1)},
        r"positions\[2\]=300 is outside": {"positions": changed(case.positions, 2, 300)},
        rf"slot_mapping\[74\]={num_slots} ": {"slots": changed(meta.slot_mapping, 74, num_slots)},
        r"block_table\[1, 0\]=-7 ": {"table": changed(meta.block_table, meta.block_table.shape[1], -7)},
        r"seq_lens\[3\]=39 ": {"lens": changed(meta.seq_lens, 3, 39)},
        "query_start_loc": {"starts": changed(meta.query_start_loc, 0, 1)},
        "index 1 is row 75 ": {"rows": torch.tensor([0, 75])},
        r"rows torch.int32 \[1\] must be": {"rows": torch.tensor([0], dtype=torch.int32)},
        "input_ids .* must be contiguous torch.int32": {"input_ids": case.input_ids.long()},
        "2 caches do not fit 1 layers": {"caches": caches * 2},
    }
    for message, change in refused.items():
        step = dataclasses.replace(
            meta,
            slot_mapping=change.get("slots", meta.slot_mapping),
            block_table=change.get("table", meta.block_table),
            seq_lens=change.get("lens", meta.seq_lens),
            query_start_loc=change.get("starts", meta.query_start_loc),
        )
        with pytest.raises((ValueError, IndexError), match=message):
            runner.forward(
                change.get("input_ids", case.input_ids),
                change.get("positions", case.positions),
                change.get("caches", caches),
                step,
                rows=change.get("rows"),
            )
        assert_same_bits(caches, case.caches)


def test_cache_of_another_geometry_is_refused(library_ops: Ops) -> None:
    layers = [make_layer(library_ops, "dense", bias=False, head_norms=False, window=None)] * 2
    case = make_case(library_ops, layers, dtype=torch.float32)
    other = make_batch([1], [5], dataclasses.replace(HEADS, num_kv_heads=3), dtype=torch.float32).cache
    with pytest.raises(ValueError, match="does not fit the layers"):
        forward(runner_of(library_ops, case), case, [case.caches[0], other])


def test_parts_that_do_not_fit_are_refused(library_ops: Ops) -> None:
    layer = make_layer(library_ops, "dense", bias=False, head_norms=False, window=None)
    case = make_case(library_ops, [layer], dtype=torch.float32)
    wrong = dataclasses.replace(layer, down=parts(library_ops, ("Q8_0",), (HIDDEN + 1,), INNER))
    with pytest.raises(ValueError, match="the sizes of 1 layers do not fit hidden_size=256"):
        library_ops.stack(dataclasses.replace(case.stack, layers=(wrong,)))


def test_there_is_no_stack_of_other_types(library_ops: Ops) -> None:
    layer = make_layer(library_ops, "dense", bias=False, head_norms=False, window=None)
    case = make_case(library_ops, [layer], dtype=torch.float32)
    assert library_ops.stack(dataclasses.replace(case.stack, norm=case.stack.norm.to(torch.bfloat16))) is None
    assert reference.stack(case.stack) is None
