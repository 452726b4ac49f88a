"""Calls the HTTP application without a socket: whole answers, streams event by event, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serve.config import EngineConfig, ServeConfig, ServerConfig
from serve.engine.outputs import RequestOutput
from serve.entrypoints.api_server import build_app
from serve.entrypoints.app_state import AppState, Phase, Services
from serve.entrypoints.loading import answer_format_of
from serve.renderers.renderer import ChatRenderer, TemplateSettings
from serve.sampling_params import SamplingParams
from serve.wire.frontend import FinishReason
from tests.fakes import ByteTokenizer, ScriptedLLM, hand_over, ready_message

LIMIT_S = 10
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
Steps = Sequence[RequestOutput | Exception | asyncio.Event]


@dataclass(slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]

    @property
    def events(self) -> list[str]:
        """The data of the events of a stream."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-1] == ""
        return [block.removeprefix("data: ") for block in blocks[:-1] if not block.startswith(":")]

    @property
    def chunks(self) -> list[dict]:
        """The events without [DONE], decoded."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]


class Exchange:
    """One request in progress; disconnect() makes the client leave."""

    def __init__(self, app, scope: dict, body: bytes) -> None:
        self._incoming: asyncio.Queue[dict] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._started = asyncio.Event()
        self.sent: list[dict] = []
        self.arrived = asyncio.Event()
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict) -> None:
        self.sent.append(message)
        self.arrived.set()

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    async def reply(self) -> Reply:
        await asyncio.wait_for(self.task, LIMIT_S)
        assert self.sent, "the application answered nothing"
        head = self.sent[0]
        headers = {k.decode(): v.decode() for k, v in head["headers"]}
        assert self.sent[-1].get("more_body", False) is False
        return Reply(head["status"], headers, self.body)


class App:
    """The application over a scripted engine client."""

    def __init__(self, state: AppState, llm: ScriptedLLM) -> None:
        self.state = state
        self.llm = llm
        self._app = build_app(state)

    def open(
        self, method: str, path: str, body: object = None, *, raw: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Exchange:
        content = raw if raw is not None else (b"" if body is None else json.dumps(body).encode())
        merged = {"host": "127.0.0.1:8000", "content-type": "application/json", **headers}
        path, _, query = path.partition("?")
        root_path = self.state.config.server.root_path
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": root_path + path,
            "raw_path": (root_path + path).encode(),
            "query_string": query.encode(),
            "root_path": root_path,
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in merged.items() if v is not None],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Exchange(self._app, scope, content)

    async def get(self, path: str, **kwargs) -> Reply:
        return await self.open("GET", path, **kwargs).reply()

    async def post(self, path: str, body: object = None, **kwargs) -> Reply:
        return await self.open("POST", path, body, **kwargs).reply()


def answer(text: str, finish: FinishReason = FinishReason.LENGTH) -> Callable[[SamplingParams], Steps]:
    """Script: every choice gets this text, at once or byte by byte when streamed."""

    def script(params: SamplingParams) -> Steps:
        if params.output_kind == 2:
            outputs = [hand_over(text, index=i, finish=finish).outputs[0] for i in range(params.n)]
            return [RequestOutput("id", [], outputs, finished=True)]
        steps = []
        for position in range(len(text)):
            for index in range(params.n):
                is_last = position == len(text) - 1
                steps.append(hand_over(text[position], index=index, finish=finish if is_last else None))
        return steps

    return script


def make_app(
    script: Callable[[SamplingParams], Steps] | None = None,
    *,
    template: str = TEMPLATE,
    max_model_len: int = 128,
    **server: object,
) -> App:
    """Build a ready application; keyword arguments are server settings."""
    config = ServeConfig(EngineConfig(), ServerConfig(**server))
    llm = ScriptedLLM(script or answer("ok"), max_model_len=max_model_len)
    tokenizer = ByteTokenizer()
    settings = TemplateSettings(chat_template=template)
    renderer = ChatRenderer(tokenizer, max_model_len=llm.max_model_len, settings=settings)
    answer_format = answer_format_of(config.server, tokenizer, settings)
    state = AppState(config, ("m", "alias"), model_root="/models/m", phase=Phase.READY)
    state.services = Services(llm, renderer, tokenizer, ready_message(), answer_format)
    return App(state, llm)


def chat(**fields: object) -> dict:
    """Give a chat body."""
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
