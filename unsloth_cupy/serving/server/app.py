"""The routes of the server: OpenAI's API, health and metrics."""

import asyncio
import base64
import hmac
import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError, UnslothCupyError
from ...placement import to_device_of, to_numpy
from ..engine import Engine
from ..tool_calls import CallForm, form_of
from . import fields
from .answers import Answer, calls_of, chat_log_probs, choice, head, text_log_probs, usage
from .fields import Asked, RequestError
from .worker import Job, Worker

READERS = 4  # threads that parse and tokenize: a long text delays no other request
BODY_SECONDS = 60  # in which a body must arrive
KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
LOCAL = {"localhost", "127.0.0.1", "::1"}


class Server:
    """A model behind OpenAI's API.

    Parameters
    ----------
    model : Transformer
        With its tokenizer.
    engine : Engine, optional
        Its engine; None for a model that returns embeddings.
    name : str
        Name of the model; other names are those of its adapters.
    limit : int
        Most tokens of a text.
    rows, queue : int
        Rows that are computed together, and most rows that wait.
    most_body : int
        Most bytes of a request.
    key : str, optional
        The key that requests need; None: none.
    chat_stops : sequence of str
        Texts that end an answer of a chat.
    local : bool
        Whether only requests to this machine's own names are answered: pages of other sites that a
        browser shows may not reach a server without a key under a name of their own.
    """

    def __init__(
        self,
        model: Any,
        engine: Engine | None,
        *,
        name: str,
        limit: int,
        rows: int,
        queue: int,
        most_body: int,
        key: str | None = None,
        chat_stops: Sequence[str] = (),
        local: bool = False,
    ) -> None:
        self.model, self.engine, self.name, self.limit = model, engine, name, limit
        self.most_rows, self.most_body, self.key = rows + queue, most_body, key
        self.chat_stops, self.local, self.started = [*chat_stops], local, int(time.time())
        self.tokenizer, self.worker = model.tokenizer, Worker(engine)
        self.rows = 0  # of requests that are not answered
        self.reading, self.jobs = 0, set[Job]()
        self.first_token_seconds = 0.0
        self.ending = False
        self.counts: Counter[str] = Counter()
        self.form: CallForm | None = None
        self.has_form = False
        self.readers = ThreadPoolExecutor(READERS, "requests")
        self.template = threading.Lock()  # it is a process with one pair of pipes
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model_of),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=routes, exception_handlers={404: self.unknown, 405: self.unknown}
        )

    @property
    def computes(self) -> bool:
        """Whether a request is read, or a row is not complete."""
        return bool(self.reading) or not all(job.done for job in self.jobs)

    async def unknown(self, request: Request, error: Exception) -> Response:
        """Return the response for a path or a method that does not exist."""
        status, allow = getattr(error, "status_code", 404), getattr(error, "headers", None)
        problem = f"{request.method} {request.url.path} does not exist"
        if allow:
            problem = f"{request.url.path} is for {allow.get('Allow')}, not {request.method}"
        self.counts[f"requests{status}"] += 1
        return refused(RequestError(problem, status=status, code="unknown_url"), allow)

    # ---- requests ------------------------------------------------------------------------------
    async def _guarded(self, work: Callable[[], Any]) -> Response:
        """Return the response of a request, or the error in OpenAI's form."""
        response: Response
        try:
            response = await work()
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it
        except asyncio.CancelledError:  # the server does not wait for this request any longer
            response = refused(RequestError("the server is shutting down", status=503))
        except Exception as error:
            response = refused(error)
        self.counts[f"requests{response.status_code}"] += 1
        return response

    def _check(self, request: Request) -> None:
        """Raise RequestError for a request to another name, or without the key."""
        host = request.headers.get("host", "")
        bare = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self.local and bare.strip("[]").lower() not in LOCAL:
            cure = "use 127.0.0.1, or set UNSLOTH_CUPY_API_KEY"
            raise RequestError(f"the host {host!r} is not this machine; {cure}", status=400)
        if self.key is not None:
            kind, _, own = request.headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(own.strip().encode(), self.key.encode())
            if kind.lower() != "bearer" or not same:
                message = "the key is missing or wrong: send Authorization: Bearer KEY"
                raise RequestError(message, status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request that may be answered."""
        self._check(request)
        if self.ending or self.worker.failed:
            reason = "is shutting down" if self.ending else "failed: see its output"
            raise RequestError(f"the server {reason}", status=503)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other sites cannot send it without being asked
            raise RequestError("send the header Content-Type: application/json")
        data, size = bytearray(), request.headers.get("content-length", "")
        if size.isdigit() and int(size) > self.most_body:
            raise self._too_long()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > self.most_body:
                        raise self._too_long()
        except TimeoutError:
            problem = f"the body did not arrive within {BODY_SECONDS} s"
            raise RequestError(problem, status=408) from None
        return await self._read(lambda: fields.parsed(bytes(data)))

    def _too_long(self) -> RequestError:
        return RequestError(f"the body has more than {self.most_body} bytes", status=413)

    async def _read(self, work: Callable[[], Any]) -> Any:
        """Return the result of a function that parses, formats or encodes, in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, work)

    def _adapter(self, body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the name of the requested model, and of its adapter."""
        name = body.get("model")
        if not isinstance(name, str):
            raise RequestError("model must be the name of a model; GET /v1/models", "model")
        if name != self.name and name not in self.model.adapters:
            names = ", ".join([self.name, *self.model.adapters])
            problem = f"the model {name[:80]!r} does not exist; there are {names}"
            raise RequestError(problem, "model", status=404, code="model_not_found")
        return name, None if name == self.name else name

    def _tokens(
        self, text: str | list[int], name: str, *, special_tokens: bool = True
    ) -> list[int]:
        """Return the tokens of a text, checked."""
        if isinstance(text, str):
            tokens = self.tokenizer.encode(text, special_tokens=special_tokens).tolist()
        else:
            tokens = text
        vocab = self.model.config.vocab
        if not tokens:
            raise RequestError(f"{name} has no tokens", name)
        if max(tokens) >= vocab:
            raise RequestError(f"{name} has a token outside the vocabulary of {vocab}", name)
        return [*tokens]

    def _asked_in_chat(self, body: dict[str, Any]) -> Asked:
        """Return the request of a chat; it runs in the thread that reads requests."""
        fields.check_names(body, fields.CHAT)
        name, adapter = self._adapter(body)
        messages, tools = fields.messages_of(body), fields.tools_of(body)
        constraint = fields.constraint_of(body)
        if tools and constraint is not None:
            raise RequestError("response_format does not work with tools", "response_format")
        if tools:
            with self.template:
                if not self.has_form:
                    self.form, self.has_form = form_of(self.tokenizer.template), True
            if self.form is None:
                raise RequestError("the model's chat template writes no tool calls", "tools")
        options = body.get("chat_template_kwargs", {})
        if not isinstance(options, dict) or options.keys() & {"messages", "tools", "now"}:
            problem = "must be an object with arguments of the chat template"
            raise RequestError(f"chat_template_kwargs {problem}", "chat_template_kwargs")
        if "reasoning_effort" in body:
            if "reasoning_effort" not in self.tokenizer.template.source:
                problem = "the model's chat template does not read reasoning_effort"
                raise RequestError(problem, "reasoning_effort")
            options = {**options, "reasoning_effort": body["reasoning_effort"]}
        with self.template:
            text = self.tokenizer.template.question(messages, tools=tools or None, options=options)
        prompt = self._tokens(text, "messages", special_tokens=False)
        log_probs, one_call = (
            fields.log_probs_of(body, chat=True),
            not fields.flag(body, "parallel_tool_calls", True),
        )
        asked = self._asked(body, name, adapter, [prompt], self.chat_stops, log_probs, None)
        for own in asked.options:
            own["constraint"] = constraint
        asked.tools, asked.one_call = tools, one_call
        return asked

    def _asked_for_text(self, body: dict[str, Any]) -> Asked:
        """Return the request of a completion; it runs in the thread that reads requests."""
        fields.check_names(body, fields.COMPLETION)
        name, adapter = self._adapter(body)
        prompts = [self._tokens(each, "prompt") for each in fields.texts_of(body, "prompt")]
        log_probs = fields.log_probs_of(body, chat=False)
        return self._asked(body, name, adapter, prompts, (), log_probs, fields.DEFAULT_NEW)

    def _asked(
        self,
        body: dict[str, Any],
        name: str,
        adapter: str | None,
        prompts: list[list[int]],
        stops: Sequence[str],
        log_probs: int | None,
        default: int | None,
    ) -> Asked:
        """Return a request with the options that chats and completions share."""
        samples, own = fields.samples_of(body), [*fields.stops_of(body), *stops]
        shared = fields.sampling(body) | {
            "adapter": adapter, "stop_texts": own, "samples": samples,
            "log_probs": log_probs is not None, "top_log_probs": log_probs or 0,
        }  # fmt: skip
        stream, with_usage = fields.streams(body)
        limits = fields.new_tokens(body, prompts, self.limit, default)
        least = fields.integer(body, "min_tokens", 0, min(limits), 0)
        options = [
            {**shared, "prompt": prompt, "max_new_tokens": most, "min_new_tokens": least,
             "first": place * samples}
            for place, (prompt, most) in enumerate(zip(prompts, limits, strict=True))
        ]  # fmt: skip
        return Asked(name, options, samples, own, stream, with_usage, log_probs)

    # ---- answers -------------------------------------------------------------------------------
    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._guarded(lambda: self._completed(request, chat=True))

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        return await self._guarded(lambda: self._completed(request, chat=False))

    async def _completed(self, request: Request, *, chat: bool) -> Response:
        """Return the answer to a chat or to prompts, or a stream of its pieces."""
        body = await self._body(request)
        if self.engine is None:
            raise RequestError(f"{self.name} has no head for text; use /v1/embeddings", "model")
        read = self._asked_in_chat if chat else self._asked_for_text
        self.reading += 1
        try:
            asked = await self._read(lambda: read(body))
        finally:
            self.reading -= 1
        rows = len(asked.options) * asked.samples
        if self.rows + rows > self.most_rows:
            problem = f"{self.rows} rows are computed or wait, and {self.most_rows} may"
            raise RequestError(f"{problem}; try again later", status=429, code="queue_full")
        self.rows += rows
        self.jobs.add(job := Job(asked.options))
        leaving = asyncio.create_task(self._leave(request, job))

        def release() -> None:
            leaving.cancel()
            self.worker.cancel(job)
            self.jobs.discard(job)
            self.rows -= rows

        try:
            self.worker.submit(job)
            accepted = await job.queue.get()
            if isinstance(accepted, UnslothCupyError):
                # of a valid request only the schema may be refused here
                shown = f"Engine.submit: constraint={asked.options[0].get('constraint')!r}: "
                problem = str(accepted).removeprefix(shown)
                param = "response_format" if problem != str(accepted) else None
                raise RequestError(f"{param}: {problem}" if param else problem, param)
            if isinstance(accepted, Exception):
                raise accepted
            answers = self._answers(asked)
            chunks = self._chunks(asked, job, answers)
            if asked.stream:
                return Events(self._events(asked, chunks, answers, chat=chat), release)
            async for _ in chunks:
                pass
            result = head(asked.name, "chat.completion" if chat else "text_completion")
            result["choices"] = [
                choice(answer, number, chat=chat, log_probs=asked.log_probs is not None)
                for number, answer in enumerate(answers)
            ]
            response = JSONResponse(result | {"usage": self._usage(asked, answers)})
        except BaseException:
            release()
            raise
        release()
        return response

    async def _leave(self, request: Request, job: Job) -> None:
        """Cancel a job when its client leaves."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(job)
        job.queue.put_nowait(ClientDisconnect())

    def _answers(self, asked: Asked) -> list[Answer]:
        """Return the samples of a request, without tokens so far."""
        ends = frozenset(self.model.config.end_tokens)
        return [
            Answer(
                self.tokenizer.backend, own["prompt"], asked.stops, ends,
                form=self.form if asked.tools else None, tools=asked.tools,
                one_call=asked.one_call,
            )
            for own in asked.options
            for _ in range(asked.samples)
        ]  # fmt: skip

    async def _chunks(
        self, asked: Asked, job: Job, answers: Sequence[Answer]
    ) -> AsyncIterator[tuple[int, str]]:
        """Yield (number of a sample, its new text) until all samples have ended."""
        start, left = time.perf_counter(), len(answers)
        while left:
            events = await job.queue.get()
            if isinstance(events, ClientDisconnect):
                raise events
            if isinstance(events, Exception):
                raise RequestError("the engine failed: see the server's output", status=500)
            if start:
                self.counts["first_tokens"] += 1
                self.first_token_seconds += time.perf_counter() - start
                start = 0.0
            for place, event in events:
                number = place * asked.samples + event.sample
                answer = answers[number]
                own = event.log_probs, event.finish, event.top_log_probs
                text = answer.push(event.tokens, *own)
                left -= event.finish is not None
                if event.finish == "error":
                    reason = "the logits contain NaN, or no token fits the constraint"
                    raise RequestError(f"sample {number}: {reason}", status=500)
                yield number, text

    async def _events(
        self, asked: Asked, chunks: Any, answers: Sequence[Answer], *, chat: bool
    ) -> AsyncIterator[str]:
        """Yield server-sent events: pieces of text as they come."""
        first = head(asked.name, "chat.completion.chunk" if chat else "text_completion")
        first |= {"usage": None} if asked.usage else {}
        started, sent = set[int](), Counter[int]()
        try:
            async for number, text in chunks:
                answer = answers[number]
                if chat and number not in started:
                    started.add(number)
                    yield event_of(first, number, {"delta": {"role": "assistant", "content": ""}})
                if not text and answer.finish is None:
                    continue
                new = answer.log_probs[sent[number] :]
                before = len(answer.text) - len(text)
                own = chat_log_probs(new) if chat else text_log_probs(new, before)
                more = {"logprobs": None if asked.log_probs is None else own}
                sent[number] += len(new)
                if not chat:
                    yield event_of(first, number, {"text": text, **more}, answer.finish)
                    continue
                if text or new:
                    yield event_of(first, number, {"delta": {"content": text}, **more})
                if answer.calls:
                    calls = calls_of(answer, numbered=True)
                    yield event_of(first, number, {"delta": {"tool_calls": calls}})
                if answer.finish is not None:
                    yield event_of(first, number, {"delta": {}}, answer.finish)
        except RequestError as error:
            yield f"data: {json.dumps(error_of(error))}\n\n"
            return
        if asked.usage:
            last = {**first, "choices": [], "usage": self._usage(asked, answers)}
            yield f"data: {json.dumps(last, ensure_ascii=False)}\n\n"
        else:
            self._usage(asked, answers)
        yield "data: [DONE]\n\n"

    def _usage(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, int]:
        """Return the numbers of tokens of a request, and count them."""
        own = usage([each["prompt"] for each in asked.options], answers)
        self.counts.update({name: own[name] for name in ("prompt_tokens", "completion_tokens")})
        return own

    async def embeddings(self, request: Request) -> Response:
        """Answer with the embedding of each text."""
        return await self._guarded(lambda: self._embedded(request))

    async def _embedded(self, request: Request) -> Response:
        body = await self._body(request)
        if self.engine is not None:
            raise RequestError(f"{self.name} is no embedding model; use /v1/completions", "model")
        fields.check_names(body, fields.EMBEDDING)
        name, adapter = self._adapter(body)
        form = body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise RequestError("encoding_format must be float or base64", "encoding_format")
        size = self.model.config.state
        if fields.integer(body, "dimensions", 1, size, size) != size:
            raise RequestError(f"dimensions must be {size}, or absent", "dimensions")
        texts = fields.texts_of(body, "input")
        rows = await self._read(lambda: [self._tokens(each, "input") for each in texts])
        for row in rows:
            if len(row) > self.limit:
                problem = f"a text may have {self.limit} tokens; this one has {len(row)}"
                raise RequestError(problem, "input", code="context_length_exceeded")
        data = []
        for place, row in enumerate(rows):
            if await request.is_disconnected():
                raise ClientDisconnect
            vector = (await self._called(partial(self._vector, row, adapter))).astype(FLOAT32)
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            own = packed if form == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": place, "embedding": own})
        tokens = sum(map(len, rows))
        self.counts["prompt_tokens"] += tokens
        numbers = {"prompt_tokens": tokens, "total_tokens": tokens}
        result = {"object": "list", "data": data, "model": name, "usage": numbers}
        return JSONResponse(result)

    def _vector(self, row: list[int], adapter: str | None) -> Array:
        """Return the embedding of a text's tokens; it runs in the thread of the engine."""
        tokens = to_device_of(np.array([row], np.int64), self.model.table)
        model = self.model if adapter is None else self.model.by_rows([adapter])
        return to_numpy(model.embeddings(tokens))[0]

    async def _called(self, work: Callable[[], Any]) -> Any:
        """Return the result of a function that the thread of the engine calls."""
        job = Job(work)
        self.worker.submit(job)
        result = await job.queue.get()
        if isinstance(result, Exception):
            raise result
        return result

    # ---- what the server is --------------------------------------------------------------------
    async def models(self, request: Request) -> Response:
        """List the model and its adapters."""
        return await self._guarded(lambda: self._models(request))

    async def _models(self, request: Request) -> Response:
        self._check(request)
        data = [self._described(name) for name in (self.name, *self.model.adapters)]
        return JSONResponse({"object": "list", "data": data})

    async def model_of(self, request: Request) -> Response:
        """Describe one model."""
        return await self._guarded(lambda: self._model(request))

    async def _model(self, request: Request) -> Response:
        self._check(request)
        name, _ = self._adapter({"model": request.path_params["name"]})
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        parent = {} if name == self.name else {"parent": self.name}
        own = {"id": name, "object": "model", "created": self.started, "owned_by": "unsloth_cupy"}
        return {**own, **parent, "max_model_len": self.limit}

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are accepted, else 503; no key is needed."""
        status = "ending" if self.ending else "failed" if self.worker.failed else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """Return counts in Prometheus's text format."""
        return await self._guarded(lambda: self._metrics(request))

    async def _metrics(self, request: Request) -> Response:
        self._check(request)
        own = dict[str, Any]() if self.engine is None else await self._called(self._engine_counts)
        counts = self.counts
        lines = ["# TYPE unsloth_cupy_requests_total counter"]
        for name in sorted(name for name in counts if name.startswith("requests")):
            status = name.removeprefix("requests")
            lines.append(f'unsloth_cupy_requests_total{{status="{status}"}} {counts[name]}')
        totals = {"prompt_tokens": counts["prompt_tokens"]}
        totals |= {"completion_tokens": counts["completion_tokens"]}
        for name, value in {**totals, **own.pop("totals", {})}.items():
            lines += [f"# TYPE unsloth_cupy_{name}_total counter"]
            lines += [f"unsloth_cupy_{name}_total {value}"]
        for name, value in {"open_rows": self.rows, **own}.items():
            lines += [f"# TYPE unsloth_cupy_{name} gauge", f"unsloth_cupy_{name} {value}"]
        lines += [
            "# TYPE unsloth_cupy_first_token_seconds summary",
            f"unsloth_cupy_first_token_seconds_sum {self.first_token_seconds:.6f}",
            f"unsloth_cupy_first_token_seconds_count {counts['first_tokens']}",
        ]
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse("\n".join(lines) + "\n", media_type=kind)

    def _engine_counts(self) -> dict[str, Any]:
        """Return the counts of the engine, in its thread."""
        engine: Any = self.engine
        return {
            "running_rows": engine.running,
            "waiting_rows": engine.waiting,
            "free_pages": engine.free_pages,
            "pages": len(engine.cache.uses),
            "totals": {
                "computed_tokens": engine.computed_rows,
                "kept_tokens": engine.kept_tokens,
            },
        }


class Events(StreamingResponse):
    """A stream of server-sent events, which releases what it uses however it ends."""

    def __init__(self, events: AsyncIterator[str], release: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self.release = release

    async def __call__(self, *arguments: Any) -> None:
        """Send the events."""
        try:
            with suppress(ClientDisconnect):
                await super().__call__(*arguments)
        finally:
            self.release()


def event_of(
    first: Mapping[str, Any], number: int, more: Mapping[str, Any], finish: str | None = None
) -> str:
    """Return a server-sent event with a piece of a sample."""
    own = {"index": number, "finish_reason": finish, "logprobs": None, **more}
    return f"data: {json.dumps({**first, 'choices': [own]}, ensure_ascii=False)}\n\n"


def error_of(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = KINDS.get(error.status, KINDS[400] if error.status < 500 else "server_error")
    fields_of = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": fields_of}


def refused(error: Exception, allow: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error; ``allow`` are the headers of a wrong method."""
    if not isinstance(error, RequestError):
        if isinstance(error, ConfigError):
            error = RequestError(str(error))
        else:
            traceback.print_exception(error, file=sys.stderr)
            error = RequestError("the server failed: see its output", status=500)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 405: allow}.get(error.status)
    if error.status in (429, 503):
        headers = {"Retry-After": "1"}
    return JSONResponse(error_of(error), error.status, headers)
