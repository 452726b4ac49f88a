"""All settings: frozen groups of fields, their flags, defaults and environment variables.

The command line is generated from these fields (entrypoints/cli.py): field name with dashes is the flag, `help`,
`choices` and `alias` come from the metadata. resolve() turns what the user asked for into what will run; it is pure.
Environment variables are read in this file only.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from serve.cpus import check_cpus, parse_cpu_list, usable_set
from serve.errors import ConfigError, InvalidRequest
from serve.limits import (
    HIGHEST_HEADER_BYTES,
    HIGHEST_JSON_DEPTH,
    HIGHEST_LOGIT_BIAS,
    HIGHEST_NUM_HEADERS,
    RequestLimits,
)
from serve.sampling_params import DEFAULT_SAMPLING_KEYS, SamplingParams, normalize
from serve.setting import flag

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
AUTO_MAX_MODEL_LEN: Final = -1
# A step of 2048 tokens, the usual default, takes seconds on a CPU, and every stream waits for it.
CPU_MAX_NUM_BATCHED_TOKENS: Final = 512
CPU_MAX_NUM_SEQS: Final = 128
MAX_CPU_THREADS: Final = 256

# Name, default and meaning of what read_environment reads, for `serve --help` and docs/flags.md.
ENVIRONMENT_HELP: Final = (
    ("SERVE_CACHE_DIR", "$XDG_CACHE_HOME/serve, or ~/.cache/serve", "where fetched models and packed weights are kept"),
    ("SERVE_API_KEY", "", "key(s) that requests must carry, separated by commas"),
    ("SERVE_LOG_LEVEL", "info", "lowest level that is logged"),
    ("SERVE_ENGINE_READY_TIMEOUT", "600", "seconds the engine core may take to become ready"),
    ("SERVE_IPC_DIR", "the system's temporary folder", "where the private folder of internal sockets is made"),
    ("HF_HUB_OFFLINE", "0", "1: fetch nothing from the hub"),
    ("NO_COLOR", "", "any value: no color in logs"),
)

_T = TypeVar("_T")
_METRIC_NAME: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What to serve and how to compute it."""

    model: str = flag(
        DEFAULT_MODEL,
        "local folder, .gguf file, name of the built-in table, or hub id",
        positional=True,
    )
    tokenizer: str | None = flag(None, "folder with tokenizer files, if not the model's")
    revision: str | None = flag(None, "branch, tag or commit of a hub id")
    served_model_name: tuple[str, ...] = flag(
        (), "names that requests may use; the first is echoed (default: the model argument)", kind="list"
    )
    dtype: str = flag(
        "auto",
        "type that weights are rounded to; auto keeps the checkpoint's own. On the CPU all arithmetic is in float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int = flag(0, "seed of dummy weights; requests carry their own, and without one are unpredictable")
    max_model_len: int | None = flag(
        None,
        "limit on prompt + output tokens; accepts 8k; -1 = the largest that fits (default: the model's)",
        kind="count",
    )
    cpu_activations: str = flag(
        "exact",
        "how rows meet quantised weights on the CPU: exact keeps what float32 keeps, int8 is faster and rounds them to "
        "8 bits, as llama.cpp does",
        choices=("exact", "int8"),
    )
    load_format: str = flag(
        "auto", "auto reads the checkpoint; dummy makes seeded random weights", choices=("auto", "dummy")
    )
    packed_weights_cache_bytes: int = flag(
        20 << 30,
        "bytes of packed weights kept on disk for faster starts, of all models together, the least recently used go; "
        "0 = keep none",
        kind="bytes",
    )
    max_logprobs: int = flag(20, "most logprobs a request may ask for; -1 = vocabulary")
    logprobs_mode: str = flag(
        "raw_logprobs",
        "what logprobs report: before or after masks, penalties and temperature",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    generation_config: str = flag("auto", "default sampling values: auto = the model's file, vllm = none, or a folder")
    override_generation_config: dict[str, float | int] = flag(
        {}, 'JSON object of default sampling values, for example {"temperature": 0.6}', kind="json"
    )
    runner: str = flag(
        "auto",
        "generate text, or give pooled results (embeddings, classes, scores); auto follows the checkpoint",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = flag(
        "auto",
        "what a pooling model is for, where the checkpoint does not say it",
        choices=("auto", "embed", "classify"),
    )
    pooler_config: dict[str, str | bool] = flag(
        {},
        "JSON object that changes how a model pools: pooling_type (cls, last, mean), normalize, is_matryoshka",
        kind="json",
    )
    enable_prompt_embeds: bool = flag(False, "accept prompts as embeddings (prompt_embeds of /v1/completions)")
    logits_processors: tuple[str, ...] = flag((), "import paths module:Class of extra logits processors", kind="list")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = flag(16, "tokens per block; a multiple of 16")
    kv_cache_dtype: str = flag(
        "auto",
        "type of cached keys and values; auto is the type of activations, float32 on the CPU; int8 has a scale "
        "for each head and token",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    gpu_memory_utilization: float = flag(
        0.92,
        "share of device memory to use in all (on the CPU: of the memory free at start, see Memory in "
        "docs/architecture.md)",
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "bytes for the KV cache; accepts 2GiB; replaces the measured size",
        alias="--kv-cache-memory",
        kind="bytes",
    )
    num_gpu_blocks_override: int | None = flag(None, "number of cache blocks, exactly")
    enable_prefix_caching: bool = flag(True, "reuse blocks of equal prefixes")
    prefix_caching_hash_algo: str = flag("sha256", "hash of block contents", choices=("sha256", "xxhash"))
    prefix_cache_seed: str | None = flag(
        None, "text that fixes the root of block hashes, to share them between servers (default: random)"
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """How much of the machine the engine uses."""

    cpu_threads: int | None = flag(
        None,
        "threads that compute (default: one a core; where a core is one processor and there are more than two, one "
        "less, for the front end)",
        kind="count",
    )
    cpu_affinity: str | None = flag(
        None,
        "processors of the engine, for example 0-3,8: its threads are tied to them one by one, and the front end keeps "
        "off them where there are others",
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Step budget and order of requests.

    What is None here depends on the machine or on another setting: resolve() chooses it.
    """

    max_num_batched_tokens: int | None = flag(
        None,
        f"token budget of a step (default: up to {CPU_MAX_NUM_BATCHED_TOKENS} on the CPU, by measured speed, or the "
        "context without chunked prefill if that is more)",
        kind="count",
    )
    max_num_seqs: int | None = flag(
        None,
        f"limit on running requests (default: {CPU_MAX_NUM_SEQS} on the CPU, at most --max-num-batched-tokens)",
        kind="count",
    )
    enable_chunked_prefill: bool = flag(True, "spread long prompts over steps")
    long_prefill_token_threshold: int | None = flag(
        None,
        "most tokens of one prompt in a step; 0 = the budget (default: three quarters of it; with no budget given also "
        "few enough that a step with decodes takes at most 2.5 times as long as without prompts)",
        kind="count",
    )
    scheduling_policy: str = flag("fcfs", "order of waiting requests", choices=("fcfs", "priority"))
    scheduler_reserve_full_isl: bool = flag(True, "admit a prompt only when the free blocks could hold all of it")
    watermark: float = flag(0.0, "share of blocks kept free when admitting")
    async_scheduling: bool = flag(True, "schedule the next step while the current one runs")
    stream_interval: int = flag(1, "tokens gathered before a chunk is sent", kind="count")
    max_waiting: int = flag(1024, "waiting requests beyond which new ones get 429", kind="count")
    max_waiting_tokens: int = flag(
        8 << 20, "prompt tokens in waiting requests beyond which new ones get 429", kind="count"
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front end."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on")
    uds: str | None = flag(None, "unix socket path to listen on instead of host and port")
    api_key: tuple[str, ...] = flag(
        (),
        "key(s) that requests must carry, as Authorization: Bearer KEY or x-api-key: KEY, for /docs too "
        "(better: environment SERVE_API_KEY)",
        kind="secret",
    )
    allow_unauthenticated: bool = flag(False, "listen on a non-loopback address without a key")
    metrics_need_key: bool = flag(False, "ask for the key on /metrics too")
    allowed_host: tuple[str, ...] = flag((), "extra Host header values to answer when bound to loopback", kind="list")
    allowed_origins: tuple[str, ...] = flag((), "CORS origins", kind="list")
    allowed_methods: tuple[str, ...] = flag(("*",), "CORS methods", kind="list")
    allowed_headers: tuple[str, ...] = flag(("*",), "CORS headers", kind="list")
    allow_credentials: bool = flag(False, "CORS credentials")
    root_path: str = flag("", "path prefix when behind a proxy")
    ssl_keyfile: str | None = flag(None, "TLS key file")
    ssl_certfile: str | None = flag(None, "TLS certificate file")
    ssl_ca_certs: str | None = flag(None, "TLS CA file for client certificates")
    ssl_cert_reqs: int = flag(0, "client certificates: 0 none, 1 optional, 2 required")
    uvicorn_log_level: str = flag(
        "info", "log level of the HTTP server", choices=("critical", "error", "warning", "info", "debug", "trace")
    )
    disable_uvicorn_access_log: bool = flag(False, "no access log lines")
    timeout_keep_alive: int = flag(15, "idle seconds before a connection is closed")
    max_body_bytes: int = flag(32 << 20, "largest request body", kind="bytes")
    max_num_prompts: int = flag(1024, "most prompts (and n times prompts) in one request")
    max_stored_responses: int = flag(
        1024, "responses kept for previous_response_id and GET /v1/responses/{id}; 0 keeps none", kind="count"
    )
    max_stored_response_bytes: int = flag(
        64 << 20, "bytes of all kept responses with their conversations; the least recently used go", kind="bytes"
    )
    enable_tokenizer_info_endpoint: bool = flag(False, "answer GET /tokenizer_info, which shows the chat template")
    disable_fastapi_docs: bool = flag(False, "no /docs and /openapi.json")
    chat_template: str | None = flag(None, "chat template: a file, or one line of Jinja")
    chat_template_content_format: str = flag(
        "auto", "how content reaches the template", choices=("auto", "string", "openai")
    )
    trust_request_chat_template: bool = flag(False, "accept chat_template in requests")
    default_chat_template_kwargs: dict[str, object] = flag({}, "JSON object of default template variables", kind="json")
    response_role: str = flag("assistant", "role of the answers")
    tool_call_parser: str | None = flag(
        None, "how the model writes tool calls (default: detected from the chat template); none = do not read calls"
    )
    reasoning_parser: str | None = flag(
        None, "how the model marks its thoughts (default: detected from the chat template); none = all is content"
    )
    enable_auto_tool_choice: bool = flag(True, "let the model choose to call tools when calls can be read")
    exclude_tools_when_tool_choice_none: bool = flag(False, 'do not show tools to the model with tool_choice "none"')
    enable_reasoning_content: bool = flag(False, "send thoughts as reasoning_content too, for older clients")
    renderer_num_workers: int = flag(1, "threads that render and tokenize")
    return_tokens_as_token_ids: bool = flag(False, "logprob tokens as token_id:N")
    enable_prompt_tokens_details: bool = flag(True, "report cached tokens in usage")
    enable_force_include_usage: bool = flag(False, "usage in every stream")
    enable_server_load_tracking: bool = flag(True, "count requests for /load")
    enable_log_requests: bool = flag(False, "log each request's id and parameters")
    disable_log_stats: bool = flag(False, "no statistics line and no engine metrics")
    metrics_prefix: str = flag("serve:", "prefix of metric names; vllm: keeps dashboards working")
    shutdown_timeout: float = flag(30.0, "seconds to finish running requests after SIGTERM")
    dev_mode: bool = flag(False, "admin routes (pause, resume, reset_prefix_cache); loopback only")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine core needs; crosses the process in the handshake."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything the command line sets."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)


@dataclass(frozen=True, slots=True)
class Environment:
    """Values read from the environment, once."""

    cache_dir: Path
    api_keys: tuple[str, ...]
    log_level: str
    no_color: bool
    hub_offline: bool
    engine_ready_timeout: float
    ipc_dir: Path


def read_environment() -> Environment:
    """Read every environment variable the server knows (SERVE_* and the customary NO_COLOR, HF_HUB_OFFLINE)."""
    env = os.environ
    base = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    timeout = env.get("SERVE_ENGINE_READY_TIMEOUT", "600")
    try:
        timeout_s = float(timeout)
    except ValueError:
        raise ConfigError(f"SERVE_ENGINE_READY_TIMEOUT={timeout!r} is not a number of seconds") from None
    return Environment(
        cache_dir=Path(env["SERVE_CACHE_DIR"]) if env.get("SERVE_CACHE_DIR") else base / "serve",
        api_keys=tuple(k for k in env.get("SERVE_API_KEY", "").split(",") if k),
        log_level=env.get("SERVE_LOG_LEVEL", "info"),
        no_color=bool(env.get("NO_COLOR")),
        hub_offline=env.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes"),
        engine_ready_timeout=timeout_s,
        ipc_dir=Path(env["SERVE_IPC_DIR"]) if env.get("SERVE_IPC_DIR") else Path(tempfile.gettempdir()),
    )


def child_environment(**changes: str) -> dict[str, str]:
    """Give this process's environment with some variables changed, for a child process."""
    return {**os.environ, **changes}


def validate(config: ServeConfig) -> None:
    """Refuse values that cannot work, before any model is looked at. Raises ConfigError naming flag and limit."""
    _validate_engine(config.engine)
    _validate_device(config.engine.device)
    _validate_server(config.server)
    _validate_limits(config.limits)


def _need(ok: bool, flag_name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{flag_name} {value} is not possible: it must be {rule}")


def _validate_device(device: DeviceConfig) -> None:
    threads = device.cpu_threads
    _need(threads is None or 1 <= threads <= MAX_CPU_THREADS, "--cpu-threads", threads, f"1 to {MAX_CPU_THREADS}")
    if device.cpu_affinity is None:
        return
    cpus = parse_cpu_list(device.cpu_affinity)
    check_cpus(cpus, usable_set())
    rule = f"at most the {len(cpus)} processors of --cpu-affinity, which take one thread each"
    _need(threads is None or threads <= len(cpus), "--cpu-threads", threads, rule)


def _validate_engine(config: EngineConfig) -> None:
    model, cache, sched = config.model, config.cache, config.scheduler
    _need(model.model.strip() != "", "--model", repr(model.model), "a path or a name")
    for name in model.served_model_name:
        _need(name.strip() != "", "--served-model-name", repr(name), "a name that is not empty")
    length = model.max_model_len
    _need(length is None or length == AUTO_MAX_MODEL_LEN or length >= 1, "--max-model-len", length, "positive, or -1")
    size = model.packed_weights_cache_bytes
    _need(size >= 0, "--packed-weights-cache-bytes", size, "0 or more")
    _need(model.max_logprobs >= -1, "--max-logprobs", model.max_logprobs, "-1 or more")
    for key, value in model.override_generation_config.items():
        is_usable = key in DEFAULT_SAMPLING_KEYS and type(value) in (int, float)
        rule = f"numbers under {', '.join(DEFAULT_SAMPLING_KEYS)}"
        _need(is_usable, "--override-generation-config", f"{key}={value!r}", rule)
    _validate_override(model.override_generation_config)
    _need(cache.block_size > 0 and cache.block_size % 16 == 0, "--block-size", cache.block_size, "a multiple of 16")
    share = cache.gpu_memory_utilization
    _need(0.0 < share <= 1.0, "--gpu-memory-utilization", share, "in (0, 1]")
    blocks = cache.num_gpu_blocks_override
    _need(blocks is None or blocks >= 2, "--num-gpu-blocks-override", blocks, "at least 2 (block 0 is reserved)")
    kv_bytes = cache.kv_cache_memory_bytes
    _need(kv_bytes is None or kv_bytes > 0, "--kv-cache-memory-bytes", kv_bytes, "positive")
    for name, count in (
        ("--max-num-batched-tokens", sched.max_num_batched_tokens),
        ("--max-num-seqs", sched.max_num_seqs),
    ):
        _need(count is None or count >= 1, name, count, "at least 1")
    for name, number in (
        ("--stream-interval", sched.stream_interval),
        ("--max-waiting", sched.max_waiting),
        ("--max-waiting-tokens", sched.max_waiting_tokens),
    ):
        _need(number >= 1, name, number, "at least 1")
    chunk = sched.long_prefill_token_threshold
    _need(chunk is None or chunk >= 0, "--long-prefill-token-threshold", chunk, "0 or more")
    _need(0.0 <= sched.watermark < 1.0, "--watermark", sched.watermark, "in [0, 1)")


def _validate_override(values: Mapping[str, float | int]) -> None:
    """Refuse defaults that no request could use."""
    names = {"max_new_tokens": "max_tokens"}
    try:
        normalize(msgspec.structs.replace(SamplingParams(), **{names.get(key, key): v for key, v in values.items()}))
    except InvalidRequest as error:
        raise ConfigError(f"--override-generation-config is not possible: {error}") from None


def _validate_server(server: ServerConfig) -> None:
    _need(0 <= server.port <= 65535, "--port", server.port, "in [0, 65535]")
    _need(server.renderer_num_workers >= 1, "--renderer-num-workers", server.renderer_num_workers, "at least 1")
    _need(server.shutdown_timeout >= 0, "--shutdown-timeout", server.shutdown_timeout, "0 or more seconds")
    _need(server.timeout_keep_alive >= 0, "--timeout-keep-alive", server.timeout_keep_alive, "0 or more seconds")
    prefix, root = server.metrics_prefix, server.root_path
    _need(_METRIC_NAME.fullmatch(prefix) is not None, "--metrics-prefix", repr(prefix), "letters, digits, _ and :")
    _need(root == "" or root.startswith("/"), "--root-path", repr(root), "empty or a path that starts with /")
    # An empty key comes from an unset variable and would let everybody in.
    _need(all(key.strip() for key in server.api_key), "--api-key", "''", "a key that is not empty")
    _need(server.max_body_bytes >= 1, "--max-body-bytes", server.max_body_bytes, "positive")
    for name, number in (
        ("--max-stored-responses", server.max_stored_responses),
        ("--max-stored-response-bytes", server.max_stored_response_bytes),
    ):
        _need(number >= 0, name, number, "0 or more")
    _need(server.max_num_prompts >= 1, "--max-num-prompts", server.max_num_prompts, "at least 1")
    is_loopback = server.uds is not None or server.host in ("127.0.0.1", "localhost", "::1")
    if server.dev_mode and not is_loopback:
        raise ConfigError(f"--dev-mode needs a loopback address, got --host {server.host}; use --host 127.0.0.1")
    if not is_loopback and not (server.api_key or server.allow_unauthenticated):
        raise ConfigError(
            f"--host {server.host} is reachable from other machines and no key is set; "
            "set --api-key or SERVE_API_KEY, or pass --allow-unauthenticated"
        )
    if (server.ssl_certfile is None) != (server.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile must be given together")


def _validate_limits(limits: RequestLimits) -> None:
    for name, value, highest in (
        ("--max-header-bytes", limits.max_header_bytes, HIGHEST_HEADER_BYTES),
        ("--max-num-headers", limits.max_num_headers, HIGHEST_NUM_HEADERS),
        ("--max-json-depth", limits.max_json_depth, HIGHEST_JSON_DEPTH),
        ("--max-logit-bias", limits.max_logit_bias, HIGHEST_LOGIT_BIAS),
    ):
        _need(1 <= value <= highest, name, value, f"1 to {highest}")
    _need(limits.max_n >= 1, "--max-n", limits.max_n, "at least 1")
    for name, value in asdict(limits).items():
        _need(value >= 0, "--" + name.replace("_", "-"), value, "0 or more")


def resolve(config: EngineConfig, model_max_len: int) -> EngineConfig:
    """Fill every None in the engine settings from the model's own context length; pure.

    max_model_len stays -1 when auto was asked: the engine core finds the value and reports it in Ready. With neither
    max_num_batched_tokens nor long_prefill_token_threshold given, the second stays None and the first is the upper
    limit: the engine core measures what steps cost and chooses (core/step_budget.py).
    Raises ConfigError when the pieces contradict each other.
    """
    length = config.model.max_model_len if config.model.max_model_len is not None else model_max_len
    if length > model_max_len:
        raise ConfigError(
            f"--max-model-len {length} exceeds the model's context of {model_max_len} tokens; lower it to at most that"
        )
    sched = config.scheduler
    longest = model_max_len if length == AUTO_MAX_MODEL_LEN else length
    # Each running request needs a token of every step, so asking for more of them asks for larger steps.
    budget = sched.max_num_batched_tokens or max(CPU_MAX_NUM_BATCHED_TOKENS, sched.max_num_seqs or 0)
    if not sched.enable_chunked_prefill and sched.max_num_batched_tokens is None:
        budget = max(budget, longest)
    seqs = sched.max_num_seqs if sched.max_num_seqs is not None else min(CPU_MAX_NUM_SEQS, budget)
    if budget < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below --max-num-seqs {seqs}; raise the first or lower the second"
        )
    if not sched.enable_chunked_prefill and budget < longest:
        # A longer prompt would never fit a step, and wait for ever.
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below max_model_len={longest} and chunked prefill is off; "
            "raise it, lower --max-model-len, or drop --no-enable-chunked-prefill"
        )
    chunk = sched.long_prefill_token_threshold
    if chunk is None and not sched.enable_chunked_prefill:
        chunk = 0
    elif chunk is None and sched.max_num_batched_tokens is not None:
        chunk = budget * 3 // 4
    return replace(
        config,
        model=replace(config.model, max_model_len=length),
        scheduler=replace(sched, max_num_batched_tokens=budget, max_num_seqs=seqs, long_prefill_token_threshold=chunk),
    )


def groups() -> tuple[tuple[str, type], ...]:
    """The flag groups in the order `serve --help` shows them."""
    return (
        ("model", ModelConfig),
        ("kv cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("device", DeviceConfig),
        ("server", ServerConfig),
        ("limits of a request", RequestLimits),
    )


class GroupFiller(Protocol):
    """Builds one of the groups, with what was chosen for it."""

    def __call__(self, group: type[_T], /) -> _T:
        """Give the group."""


def assemble(fill: GroupFiller) -> ServeConfig:
    """Build the settings out of groups that fill makes."""
    engine = EngineConfig(
        model=fill(ModelConfig), cache=fill(CacheConfig), scheduler=fill(SchedulerConfig), device=fill(DeviceConfig)
    )
    return ServeConfig(engine=engine, server=fill(ServerConfig), limits=fill(RequestLimits))


def field_names(group: type) -> tuple[str, ...]:
    """Names of the settings in a group, in declaration order."""
    return tuple(f.name for f in fields(group))
