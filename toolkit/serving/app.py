"""The server's routes: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, streamed and whole.

Errors have OpenAI's shape. A request whose client leaves is cancelled.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from toolkit import hub
from toolkit.errors import UserError
from toolkit.extras import extra
from toolkit.offload.chat_template import has_template, tokens_of
from toolkit.offload.generation import Request, Score, TextPiece, Writer
from toolkit.serving.answers import Answer
from toolkit.serving.requests import ChatRequest, CompletionRequest, parsed
from toolkit.serving.worker import BusyError, StoppedError, Work, Worker

with extra("serve"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

log = logging.getLogger(__name__)

BODY_BYTES = 4_000_000
LOOK_S = 0.2  # between two looks whether the client is still there
GONE = 499  # nobody reads it; other servers' status for a client that has left
KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
KINDS |= dict.fromkeys((500, 503), "server_error")
CODES = {401: "invalid_api_key", 404: "not_found", 413: "body_too_large", 429: "queue_full"}

Result = TypeVar("Result")


def make_app(writer: Writer, name: str, token: str | None, waiting: int) -> Starlette:
    """The application that serves one model under a name. A `token` is demanded if there is one.

    `waiting` requests may wait for the one that runs.
    """
    return _Server(writer, name, token, waiting).app()


class _Server:
    def __init__(self, writer: Writer, name: str, token: str | None, waiting: int):
        self._name, self._token, self._tokenizer = name, token, writer.tokenizer
        self._worker = Worker(writer, waiting)

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _told})
        app.state.cancel = self._worker.cancel
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._worker.close()

    def _guarded(self, endpoint: Callable[[HttpRequest], Awaitable[Response]]):
        """The endpoint for those who have the token; its errors as answers."""

        async def answered(request: HttpRequest) -> Response:
            try:
                self._check_token(request)
                return await endpoint(request)
            except BusyError as error:
                return _failed(429, str(error))
            except StoppedError as error:
                return _failed(503, str(error))
            except UserError as error:
                return _failed(400, str(error))
            except HTTPException:
                raise
            except Exception:
                log.exception("a request failed")
                return _failed(500, "the server failed; its log says more")

        return answered

    def _check_token(self, request: HttpRequest) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token is not None and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise HTTPException(401, "the token is wrong or absent: send it as Authorization: Bearer TOKEN")

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "local"}

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise HTTPException(404, f"no model {name!r:.99}: this server has {self._name!r}")

    async def _completions(self, request: HttpRequest) -> Response:
        asked: CompletionRequest = parsed(CompletionRequest, await _body(request))
        self._check_name(asked.model)
        prompts = [self._tokens(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts()]
        echoed = None
        if asked.echo:
            echoed = [self._text(prompt) if isinstance(prompt, list) else prompt for prompt in asked.prompts()]
        return await self._answered(request, asked, prompts, echoed, asked.logprobs is not None)

    async def _chat(self, request: HttpRequest) -> Response:
        asked: ChatRequest = parsed(ChatRequest, await _body(request))
        self._check_name(asked.model)
        if not has_template(self._tokenizer):
            raise UserError("this model has no chat template: use /v1/completions")
        prompt = tokens_of(self._tokenizer, [message.as_text() for message in asked.messages])
        return await self._answered(request, asked, [prompt], None, bool(asked.logprobs))

    def _tokens(self, text: str) -> list[int]:
        with hub.foreign_code("the tokenizer of the model", "it fails"):
            return self._tokenizer(text)["input_ids"]

    def _text(self, tokens: list[int]) -> str:
        with hub.foreign_code("the tokenizer of the model", "it fails"):
            return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    async def _answered(
        self,
        request: HttpRequest,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
        echoed: Sequence[str] | None,
        scored: bool,
    ) -> Response:
        """The answer to one or more prompts, whole or as a stream. Errors before its first piece have a status."""
        answer = Answer(self._name, isinstance(asked, ChatRequest), self._tokenizer, sum(map(len, prompts)))
        wanted = asked.request()
        job = self._worker.submit(lambda writer, cancelled: _texts(writer, cancelled, prompts, echoed, wanted))
        try:
            if not asked.stream:
                pairs = await _while_connected(request, _all(job))
                return JSONResponse(answer.whole(_joined(pairs, len(prompts), answer), scored))
            first = await _while_connected(request, anext(job))
        except BaseException:
            job.cancel()
            raise
        return StreamingResponse(
            _events(job, first, answer, scored, asked.with_usage()), media_type="text/event-stream"
        )


def _texts(
    writer: Writer,
    cancelled: Callable[[], bool],
    prompts: Sequence[list[int]],
    echoed: Sequence[str] | None,
    wanted: Request,
) -> Iterator[tuple[int, TextPiece]]:
    """The pieces of each prompt's text, by its number; of an echo first the prompt, as one piece a token."""
    for index, prompt in enumerate(prompts):
        logits = None
        if echoed is not None:
            scores: Sequence[Score | None] = [None] * len(prompt)
            if wanted.likeliest is not None:
                scores, logits = writer.scored(prompt, wanted.likeliest, cancelled)
                if logits is None:
                    raise StoppedError
            for place, (token, score) in enumerate(zip(prompt, scores, strict=False)):
                yield index, TextPiece(token, "" if place else echoed[index], score=score, given=True)
        if wanted.most == 0:
            yield index, TextPiece(None, "", "length")
            continue
        for piece in writer.continued(prompt, wanted, cancelled, logits):
            if piece.end == "cancelled":
                raise StoppedError
            yield index, piece


def _joined(
    pairs: Sequence[tuple[int, TextPiece]], count: int, answer: Answer
) -> list[tuple[str, list[tuple[int, Score | None]], str]]:
    """Each prompt's text, tokens and end."""
    texts = []
    for index in range(count):
        pieces = [piece for at, piece in pairs if at == index]
        tokens = [(piece.token, piece.score) for piece in pieces if piece.token is not None]
        texts.append(("".join(piece.text for piece in pieces), tokens, pieces[-1].end if pieces else ""))
    answer.new_tokens = sum(piece.is_new for _, piece in pairs)
    return texts


async def _events(
    job: Work, first: tuple[int, TextPiece], answer: Answer, scored: bool, usage: bool
) -> AsyncIterator[str]:
    """The pieces as server-sent events. An error after the first one is an event, too."""
    begun: set[int] = set()
    try:
        pair: tuple[int, TextPiece] | None = first
        while pair is not None:
            index, piece = pair
            answer.new_tokens += piece.is_new
            if piece.text or piece.end or scored:
                yield _event(answer.chunk(index, piece, scored, index not in begun, usage))
                begun.add(index)
            pair = await anext(job, None)
        if usage:
            yield _event(answer.last_chunk())
        yield "data: [DONE]\n\n"
    except UserError as error:
        yield _event(_error(503 if isinstance(error, StoppedError) else 400, str(error)))
    except Exception:
        log.exception("a request failed")
        yield _event(_error(500, "the server failed; its log says more"))
    finally:
        job.cancel()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _all(job: Work) -> list[Any]:
    return [result async for result in job]


async def _while_connected(request: HttpRequest, result: Awaitable[Result]) -> Result:
    """Wait for a result as long as the client does. Raises `HTTPException` once it has left."""
    waiting = asyncio.ensure_future(result)
    try:
        while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                raise HTTPException(GONE, "the client has left")
        return waiting.result()
    finally:
        waiting.cancel()


async def _body(request: HttpRequest) -> bytes:
    """The body. Raises `HTTPException` for one that is too large, or no JSON by its header."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "expected a body of Content-Type: application/json")
    parts, size = [], 0
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            size += len(part)
            if size > BODY_BYTES:
                raise HTTPException(413, f"a body of more than {BODY_BYTES} bytes: send a shorter prompt")
            parts.append(part)
    return b"".join(parts)


async def _told(_: HttpRequest, error: Any) -> Response:
    return _failed(error.status_code, error.detail)


def _failed(status: int, message: str) -> Response:
    return JSONResponse(_error(status, message), status_code=status)


def _error(status: int, message: str) -> dict[str, Any]:
    kind = KINDS.get(status, KINDS[400])
    return {"error": {"message": message, "type": kind, "param": None, "code": CODES.get(status)}}
