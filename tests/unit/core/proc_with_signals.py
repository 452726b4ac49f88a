"""A process for test_proc: an engine core in the main thread that signals itself."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from serve.core.executor.uniproc import UniprocExecutor
from serve.core.proc import EngineCoreProc
from serve.wire import sockets
from serve.wire.frontend import EngineInit
from tests.unit.core.scripted import ScriptedWorker, make_checkpoint, make_config
from tests.unit.core.test_proc import Client


def main() -> None:
    """Serve a request after SIGINT, then end on SIGTERM with the engine's exit code."""
    with tempfile.TemporaryDirectory() as directory:
        client = Client(sockets.new_context(), Path(directory), 0)
        executor = UniprocExecutor(lambda config, checkpoint: ScriptedWorker(), make_config(), make_checkpoint())
        init = EngineInit(make_config(), make_checkpoint(), [client.input_address], [client.output_address])
        proc = EngineCoreProc(init, executor)

        def send_signals() -> None:
            client.receive_ready()
            os.kill(os.getpid(), signal.SIGINT)
            client.add("a", [1, 2, 3])
            client.receive_end("a")
            sys.stdout.write("served after SIGINT\n")
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=send_signals, daemon=True).start()
        code = proc.run()
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main()
