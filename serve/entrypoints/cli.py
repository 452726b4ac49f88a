"""The `serve` command: reads the flags, starts the server or fetches a model, and gives the exit code.

Heavy modules are imported only once the arguments are known to be good, so that mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from serve import __version__
from serve.config import Environment, ServeConfig, read_environment, validate
from serve.cpus import keep_off, parse_cpu_list
from serve.entrypoints.batch_file import BatchOutput, check_paths, count_left
from serve.entrypoints.flags import BATCH_USAGE, PULL_USAGE, FlagParser, build_parser, config_from_flags, parse_flags
from serve.entrypoints.listener import bind_listener, close_listener
from serve.errors import ConfigError, ExitCode
from serve.log import decorate_process, setup_logging

log = logging.getLogger(__name__)


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived before the server ran; not an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give the process exit code; complaints are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["pull"]:
            return _pull(arguments[1:])
        if arguments[:1] == ["run-batch"]:
            return _run_batch(arguments[1:])
        return _serve(arguments)
    except ConfigError as error:
        _complain(error)
        return int(error.exit_code)
    except Stopped:
        return int(ExitCode.OK)


def _complain(error: ConfigError) -> None:
    text = " ".join(str(error).split())
    sys.stderr.write(f"serve: error: {text}\n")


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def _serve(arguments: list[str]) -> int:
    parsed = parse_flags(build_parser(), arguments)
    if parsed.version:
        sys.stdout.write(f"serve {__version__}\n")
        return int(ExitCode.OK)
    config, environment = _settings(parsed)
    listener = bind_listener(config.server)
    try:
        return _start(config, environment, listener)
    finally:
        close_listener(listener, config.server)


def _settings(parsed: argparse.Namespace) -> tuple[ServeConfig, Environment]:
    """Give the settings that the flags ask for, checked as far as no model is needed."""
    del parsed.version
    environment = read_environment()
    config = with_environment_keys(config_from_flags(parsed), environment)
    validate(config)
    _end_quietly_on_signals()
    server = config.server
    if server.chat_template or server.tool_call_parser or server.reasoning_parser:
        from serve.entrypoints.start_checks import check_answer_settings

        check_answer_settings(server)
    return config, environment


def _start(config: ServeConfig, environment: Environment, listener: socket.socket) -> int:
    """Spawn the engine before loading the HTTP stack: its libraries take the longest."""
    from serve.launch import spawn_engine

    decorate_process("APIServer", color=not environment.no_color)
    setup_logging(environment.log_level)
    affinity = config.engine.device.cpu_affinity
    if affinity is not None:
        keep_off(parse_cpu_list(affinity))
    process = spawn_engine(environment, drain_seconds=config.server.shutdown_timeout)
    try:
        from serve.entrypoints.model_argument import check_model_argument
        from serve.entrypoints.start_checks import check_against_model

        check_model_argument(config.engine.model.model, environment)
        check_against_model(config.engine, environment)
        from serve.entrypoints.run_server import run_server

        return int(run_server(config, environment, listener, process=process))
    finally:
        process.kill()


def _run_batch(arguments: list[str]) -> int:
    parser = build_parser()
    parser.prog, parser.usage = "serve run-batch", BATCH_USAGE
    parser.description = "Answer the requests of a file in the format of OpenAI's batches, one line for each."
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="INPUT", help="requests, one a line")
    parser.add_argument(
        "-o", "--output-file", required=True, type=Path, metavar="OUTPUT", help="answers; what it holds is kept"
    )
    parsed = parse_flags(parser, arguments)
    source, target = parsed.input_file, parsed.output_file
    del parsed.input_file, parsed.output_file
    config, environment = _settings(parsed)
    check_paths(source, target)
    decorate_process("Batch", color=not environment.no_color)
    setup_logging(environment.log_level)
    output = BatchOutput(target)
    try:
        num_left = count_left(source, output, max_bytes=config.server.max_body_bytes)
        if num_left == 0:
            log.info("batch complete: %s; nothing was left to do", output.summary())
            return int(ExitCode.OK)
        return _answer_batch(config, environment, source, output=output, num_left=num_left)
    finally:
        output.close()


def _answer_batch(
    config: ServeConfig, environment: Environment, source: Path, *, output: BatchOutput, num_left: int
) -> int:
    from serve.launch import spawn_engine

    process = spawn_engine(environment, drain_seconds=0.0)
    try:
        from serve.entrypoints.run_batch import run_batch
        from serve.entrypoints.start_checks import check_against_model
        from serve.model_store import resolve_model

        model = config.engine.model
        check_against_model(config.engine, environment)
        path = resolve_model(model.model, model.revision, environment)
        return int(
            run_batch(config, environment, process, model_path=path, source=source, output=output, num_left=num_left)
        )
    finally:
        process.kill()


def _end_quietly_on_signals() -> None:
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)


def with_environment_keys(config: ServeConfig, environment: Environment) -> ServeConfig:
    """Take the keys of SERVE_API_KEY when no flag gives any."""
    if config.server.api_key or not environment.api_keys:
        return config
    return dataclasses.replace(config, server=dataclasses.replace(config.server, api_key=environment.api_keys))


def _pull(arguments: list[str]) -> int:
    parser = FlagParser(
        prog="serve pull",
        usage=PULL_USAGE,
        description="Fetch a model into the cache folder.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a name of the built-in table or a hub id")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of a hub id")
    parsed = parse_flags(parser, arguments)
    environment = read_environment()
    setup_logging(environment.log_level)
    _end_quietly_on_signals()
    from serve.model_store import resolve_model

    path = resolve_model(parsed.model, parsed.revision, environment)
    sys.stdout.write(f"{path}\n")
    return int(ExitCode.OK)
