"""The server with OpenAI's own client: answers, streams, refusals, clients that leave, SIGTERM."""

import asyncio
import base64
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from unsloth_cupy import Engine, models
from unsloth_cupy.cli import serve as command
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.models.text.chat import CHATML_TOKENS
from unsloth_cupy.serving import scheduler

WHY = "needs the extra `peers`: openai, starlette, uvicorn and llguidance"
openai = pytest.importorskip("openai", reason=WHY)
for package in ("starlette", "uvicorn", "llguidance"):
    pytest.importorskip(package, reason=WHY)

from unsloth_cupy.serving.server.app import Server  # noqa: E402
from unsloth_cupy.serving.server.running import Listening, bound  # noqa: E402

from .test_tool_calls import TEMPLATES, TOOLS  # noqa: E402

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 640,
}  # fmt: skip
ASKED = [{"role": "user", "content": "Who sees the cat?"}]
PAGES, PAGE, ROWS, QUEUE, KEY = 160, 4, 8, 400, "a key"


def folder_of(path, **values):
    tokenizer = train_tokenizer("Who sees the cat? The dog does. " * 9, 300, CHATML_TOKENS)
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0} | values
    models.create(config, seed=0).save(path)
    tokenizer.save(str(path / "tokenizer.json"))
    template = TEMPLATES["hermes"].replace("<|{{ m.role[:1] }}|>", "<|im_start|>{{ m.role }}\n")
    template = template.replace("<|a|>", "<|im_start|>assistant\n").replace("<|end|>", "<|im_end|>")
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("models") / "model")


@contextlib.contextmanager
def serving(server):
    """Run a server in a thread; yield its port."""
    ready = threading.Event()
    with bound("127.0.0.1", 0) as listener:
        own = Listening(server, ready.set)
        server.worker.start()
        thread = threading.Thread(target=own.run, args=([listener],))
        thread.start()
        try:
            assert ready.wait(30)
            yield listener.getsockname()[1]
        finally:
            own.handle_exit(signal.SIGTERM, None)
            thread.join(30)
            server.worker.stop()
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(folder):
    model = models.load(folder)
    model.add_adapter(4, seed=0)
    model.adapter.parameters |= {n: a + 0.5 for n, a in model.adapter.parameters.items()}
    model.save_adapter(folder.parent / "adapter")
    model = models.load(folder)
    model.load_adapter(folder.parent / "adapter", "other")
    stops = command.end_answers(model)
    engine = Engine(model, rows=ROWS, pages=PAGES, page=PAGE)
    own = Server(
        model, engine, name="tiny", limit=512, rows=ROWS, queue=QUEUE, most_body=1 << 16, key=KEY,
        chat_stops=stops,
    )  # fmt: skip
    with serving(own) as port:
        yield SimpleNamespace(own=own, port=port, model=models.load(folder), stops=stops)
    assert (engine.running, engine.waiting, engine.free_pages) == (0, 0, PAGES)


@pytest.fixture
def client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as own:
        yield own


def settled(server, seconds=20):
    """Wait until no row is left; return the free pages."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and (server.own.rows or server.own.worker.jobs):
        time.sleep(0.01)
    engine = server.own.engine
    return server.own.rows, engine.running, engine.waiting, engine.free_pages


def expected_text(server, prompt, **options):
    model = server.model
    model.config = server.own.model.config
    return model.generate_text(prompt, stop=server.stops, **options)


# ---- answers -----------------------------------------------------------------------------------
def test_a_chat_is_answered_as_the_model_does(server, client):
    options = {"temperature": 0.7, "seed": 3}
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=20, n=3, logprobs=True, **options
    )
    expected = expected_text(server, ASKED, max_new_tokens=20, **options)
    assert answer.choices[0].message.content == expected
    assert len({each.message.content for each in answer.choices}) == 3
    assert [each.index for each in answer.choices] == [0, 1, 2]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    prompt = server.model.tokenizer.encode(server.model.tokenizer.chat(ASKED), special_tokens=False)
    assert answer.usage.prompt_tokens == len(prompt)
    every = server.model.generate(prompt[None], max_new_tokens=20, **options)
    first = answer.choices[0].logprobs.content
    assert len(first) == every.shape[1] - len(prompt)
    whole = server.model.log_probs(every, every, temperature=0.7).log_probs[0, len(prompt) - 1 : -1]
    np.testing.assert_allclose([each.logprob for each in first], whole, atol=1e-5)
    pieces = [(each.token, each.bytes) for each in first]
    assert all(text.encode() == bytes(own) for text, own in pieces if own is not None)
    assert any("\ufffd" in text for text, _ in pieces) == (None in [own for _, own in pieces])


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_has_the_pieces_of_the_answer(server, client, count):
    options = {"model": "tiny", "messages": ASKED, "max_tokens": 24, "seed": 1, "n": count}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    texts, ends, usage = [""] * count, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for each in chunk.choices:
            texts[each.index] += each.delta.content or ""
            ends |= {each.index: each.finish_reason} if each.finish_reason else {}
    assert texts == [each.message.content for each in whole.choices]
    assert ends == {each.index: each.finish_reason for each in whole.choices}
    assert usage == whole.usage


def test_texts_and_tokens_are_completed(server, client):
    tokens = server.model.tokenizer.encode("The dog").tolist()
    many = client.completions.create(
        model="tiny", prompt=["The dog", "Who sees"], max_tokens=9, temperature=0, logprobs=0
    )
    one = client.completions.create(model="tiny", prompt=tokens, max_tokens=9, temperature=0)
    expected = server.model.generate_text("The dog", max_new_tokens=9, temperature=0)
    assert [many.choices[0].text, one.choices[0].text] == [expected] * 2
    assert len(many.choices) == 2
    assert len(many.choices[0].logprobs.token_logprobs) == 9
    short = client.completions.create(model="tiny", prompt="The", seed=0)
    assert short.usage.completion_tokens <= 16
    pieces = client.completions.create(
        model="tiny", prompt="The dog", max_tokens=9, temperature=0, stream=True, logprobs=0
    )
    chunks = [chunk.choices[0] for chunk in pieces]
    assert "".join(each.text for each in chunks) == expected
    places = [place for each in chunks for place in each.logprobs.text_offset]
    assert places == sorted(places)
    assert len(places) == 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_the_most_likely_tokens_at_each_place(server, client, count, stream):
    """Of chats and of completions: those of softmax(logits / temperature) of the whole text."""
    prompt = server.model.tokenizer.encode("The dog").tolist()
    options = {"temperature": 0.7, "seed": 3, "max_tokens": 9}
    text = server.model.generate(np.array([prompt]), max_new_tokens=9, temperature=0.7, seed=3)
    logits = server.model.logits(text)[0, len(prompt) - 1 : -1].astype(np.float64) / 0.7
    whole = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    decode = server.model.tokenizer.backend.decode
    expected = [
        {decode([token], skip_special_tokens=False): row[token] for token in order[::-1]}
        for row, order in zip(whole, np.argsort(-whole, axis=-1)[:, :count], strict=True)
    ]
    answer = client.completions.create(
        model="tiny", prompt=prompt, logprobs=count, stream=stream, **options
    )
    each = (
        [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    )
    tokens = [token for own in each for token in own.tokens]
    tops = [top for own in each for top in own.top_logprobs or ()]
    assert len(tokens) == len(expected) == 9
    assert len(tops) == (9 if count else 0)
    for top, own, row in zip(tops, tokens, expected, strict=False):
        assert top.keys() == row.keys() | {own}
        np.testing.assert_allclose([top[key] for key in row], [*row.values()], atol=1e-5)
    chat = client.chat.completions.create(
        model="tiny", messages=ASKED, logprobs=True, top_logprobs=count, stream=stream, **options
    )
    each = [chunk.choices[0].logprobs for chunk in chat] if stream else [chat.choices[0].logprobs]
    content = [place for own in each if own is not None for place in own.content]
    assert len(content) == 9
    for place in content:
        likely = [other.logprob for other in place.top_logprobs]
        assert len(likely) == count
        assert likely == sorted(likely, reverse=True)
        if count and place.logprob > likely[-1]:
            same = [other for other in place.top_logprobs if other.logprob == place.logprob]
            assert place.token in [other.token for other in same]


def test_stop_texts_end_an_answer_before_them(server, client):
    options = {"model": "tiny", "prompt": "The dog", "max_tokens": 30, "seed": 5}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[5:8]
    cut = client.completions.create(stop=["#####", stop], **options).choices[0]
    assert cut.text == whole.partition(stop)[0]
    assert cut.finish_reason == "stop"
    stream = client.completions.create(stop=stop, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.text


def test_adapters_are_models(server, client):
    names = [each.id for each in client.models.list()]
    assert names == ["tiny", "other"]
    assert client.models.retrieve("other").parent == "tiny"
    answers = [
        client.completions.create(model=name, prompt="The", temperature=0, max_tokens=12)
        for name in names
    ]
    assert answers[0].choices[0].text != answers[1].choices[0].text
    assert [each.model for each in answers] == names


def scripted(monkeypatch, server, text):
    """Let the engine draw the tokens of a text, and then the end."""
    tokens = [*server.model.tokenizer.encode(text).tolist(), 0]

    def choose(logits, rows, ends, numbers):
        return np.array([tokens[min(row.count, len(tokens) - 1)] for row in rows])

    monkeypatch.setattr(scheduler, "choose", choose)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "é"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(server, client, monkeypatch, stream):
    scripted(monkeypatch, server, f"I add. {CALL}\n{CALL}")
    options = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
    if stream:
        calls, text = {}, ""
        for chunk in client.chat.completions.create(stream=True, **options):
            text += chunk.choices[0].delta.content or ""
            calls |= {each.index: each for each in chunk.choices[0].delta.tool_calls or []}
            finish = chunk.choices[0].finish_reason
        calls = [calls[place] for place in sorted(calls)]
    else:
        choice = client.chat.completions.create(**options).choices[0]
        calls, text, finish = (
            choice.message.tool_calls,
            choice.message.content,
            choice.finish_reason,
        )
    assert text.strip() == "I add."
    assert [each.function.name for each in calls] == ["add", "add"]
    assert [json.loads(each.function.arguments) for each in calls] == [{"a": 1, "text": "é"}] * 2
    assert finish == "tool_calls"
    one = client.chat.completions.create(parallel_tool_calls=False, **options)
    assert len(one.choices[0].message.tool_calls) == 1
    plain = client.chat.completions.create(tool_choice="none", **options).choices[0]
    assert plain.message.tool_calls is None
    history = [*ASKED, {"role": "assistant", "tool_calls": [each.model_dump() for each in calls]}]
    history += [{"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
    client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)


def test_an_answer_has_the_requested_form(server, client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, response_format=form, seed=0, max_tokens=60
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 9
    form["json_schema"]["schema"] = {"type": "nothing"}
    with pytest.raises(openai.BadRequestError, match="response_format: Invalid type: nothing"):
        client.chat.completions.create(model="tiny", messages=ASKED, response_format=form)


def test_characters_are_whole_in_a_stream(server, client, monkeypatch):
    text = "«é»\N{CAT FACE}日本 x"
    scripted(monkeypatch, server, text)
    stream = client.completions.create(model="tiny", prompt="The", max_tokens=90, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = client.completions.create(model="tiny", prompt="The", max_tokens=3)
    assert cut.choices[0].text.startswith("«")


# ---- refusals ----------------------------------------------------------------------------------
def post(server, body, path="/v1/completions", key=KEY, kind="application/json", **headers):
    """Send a body as it is; return the status and the JSON of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        own = {"Content-Type": kind, "Authorization": f"Bearer {key}", **headers}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, own)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def called(arguments):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


NO_SCHEMA = {"type": "none"}
BASE = {"model": "tiny", "prompt": "The"}
CHAT = {"model": "tiny", "messages": ASKED}
DEEP = b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
REFUSED = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"[1]", 400, None),
    (b"\xff\xfe", 400, None),
    (b'{"model": "tiny", "prompt": NaN}', 400, None),
    (b'{"model": "tiny", "prompt": "\\ud800"}', 400, None),
    (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 9999 + b"}", 400, None),
    (DEEP, 400, None),
    (b'{"prompt": "' + b"a" * (1 << 16) + b'"}', 413, None),
    (BASE | {"model": "none"}, 404, "model"),
    (BASE | {"model": ["tiny"]}, 400, "model"),
    ({"prompt": "The"}, 400, "model"),
    ({"model": "tiny"}, 400, "prompt"),
    (BASE | {"prompt": []}, 400, "prompt"),
    (BASE | {"prompt": ["a", [1]]}, 400, "prompt"),
    (BASE | {"prompt": [[]]}, 400, "prompt"),
    (BASE | {"prompt": [-1]}, 400, "prompt"),
    (BASE | {"prompt": [1 << 70]}, 400, "prompt"),
    (BASE | {"prompt": [True]}, 400, "prompt"),
    (BASE | {"prompt": {"a": 1}}, 400, "prompt"),
    (BASE | {"prompt": ["a"] * 3000}, 400, "prompt"),
    (BASE | {"prompt": "The dog " * 300}, 400, "max_tokens"),
    (BASE | {"max_tokens": -1}, 400, "max_tokens"),
    (BASE | {"max_tokens": 10**9}, 400, "max_tokens"),
    (BASE | {"max_tokens": 1.5}, 400, "max_tokens"),
    (BASE | {"n": 10**9}, 400, "n"),
    (BASE | {"n": 0}, 400, "n"),
    (BASE | {"n": 128, "prompt": ["a"] * 4}, 429, None),
    (BASE | {"best_of": 3}, 400, "best_of"),
    (BASE | {"temperature": -1}, 400, "temperature"),
    (BASE | {"temperature": "hot"}, 400, "temperature"),
    (BASE | {"temperature": True}, 400, "temperature"),
    (BASE | {"top_p": 0}, 400, "top_p"),
    (BASE | {"seed": -1}, 400, "seed"),
    (BASE | {"stop": ["a"] * 100}, 400, "stop"),
    (BASE | {"stop": "a" * 1000}, 400, "stop"),
    (BASE | {"stop": [""]}, 400, "stop"),
    (BASE | {"stop": [1]}, 400, "stop"),
    (BASE | {"logprobs": 21}, 400, "logprobs"),
    (BASE | {"logprobs": True}, 400, "logprobs"),
    (BASE | {"echo": True}, 400, "echo"),
    (BASE | {"presence_penalty": 0.5}, 400, "presence_penalty"),
    (BASE | {"logit_bias": {"5": 10}}, 400, "logit_bias"),
    (BASE | {"stream": "yes"}, 400, "stream"),
    (BASE | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (BASE | {"min_tokens": 17}, 400, "min_tokens"),
    (BASE | {"guided": "a"}, 400, "guided"),
    (CHAT | {"messages": []}, 400, "messages"),
    (CHAT | {"messages": ["a"]}, 400, "messages[0].role"),
    (CHAT | {"messages": [{"role": "boss", "content": "a"}]}, 400, "messages[0].role"),
    (CHAT | {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT | {"messages": [{"role": "user", "content": "a", "x": 1}]}, 400, "messages[0].x"),
    (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content",
    ),
    (CHAT | {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    (CHAT | {"top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT | {"top_logprobs": 3, "logprobs": False}, 400, "top_logprobs"),
    (CHAT | {"tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT | {"tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT | {"tools": TOOLS, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT | {"response_format": {"type": "xml"}}, 400, "response_format"),
    (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}}},
        400,
        "response_format",
    ),
    (CHAT | {"reasoning_effort": "high"}, 400, "reasoning_effort"),
    (CHAT | {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT | {"prompt": "a"}, 400, "prompt"),
    (CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens"),
    (CHAT | {"messages": [{"role": "tool", "content": "a", "name": [1]}]}, 400, "messages[0].name"),
    (CHAT | {"messages": [called("[1]")]}, 400, "messages[0].tool_calls"),
    (CHAT | {"messages": [called("{")]}, 400, "messages[0].tool_calls"),
    (CHAT | {"messages": [called("{}") | {"tool_calls": 5}]}, 400, "messages[0].tool_calls"),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools"),
    ({"model": "tiny", "input": "a"}, 400, "model"),
]


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_what_has_no_meaning_is_refused_by_name(server, place):
    body, expected, param = REFUSED[place]
    path = "/v1/completions"
    if isinstance(body, dict) and ("messages" in body or "input" in body):
        path = "/v1/chat/completions" if "messages" in body else "/v1/embeddings"
    status, answer = post(server, body, path)
    error = answer["error"]
    assert (status, error["param"]) == (expected, param), error
    assert {"message", "type", "param", "code"} == error.keys()
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Engine" not in error["message"]  # clients do not call it


def test_fields_that_change_nothing_are_accepted(client):
    client.chat.completions.create(
        model="tiny", messages=ASKED, max_completion_tokens=2, user="a", metadata={"a": "b"},
        store=False, presence_penalty=0, frequency_penalty=0, logit_bias={}, service_tier="auto",
        temperature=0, top_p=1, seed=7,
    )  # fmt: skip


def test_a_body_that_is_too_long_is_not_awaited(server):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {10**12}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as own:
        own.sendall(head.encode())
        assert own.recv(99).startswith(b"HTTP/1.1 413")


def test_a_long_text_delays_no_other_request(server, monkeypatch):
    """Texts become tokens in several threads."""
    waiting, encode = threading.Event(), server.own.tokenizer.encode

    def slow(text, **options):
        if text == "slow":
            assert waiting.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(server.own.tokenizer, "encode", slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        late = pool.submit(post, server, BASE | {"prompt": "slow", "max_tokens": 1})
        assert post(server, BASE | {"max_tokens": 1})[0] == 200
        assert not late.done()
        waiting.set()
        assert late.result()[0] == 200


def test_the_key_is_needed(server):
    for key in ("wrong", "", "a ke", "é"):
        status, answer = post(server, BASE, key=key.encode())
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
    assert post(server, BASE, kind="text/plain")[0] == 400
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    expected = {"/health": 200, "/metrics": 401, "/v1/models": 401, "/nothing": 404}
    for path, status in expected.items():
        connection.request("GET", path)
        answer = connection.getresponse()
        assert (path, answer.status) == (path, status)
        answer.read()
    connection.close()


def test_paths_and_methods_that_do_not_exist(server):
    before = post(server, {}, "/v1/none")[0], server.own.counts["requests405"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("OPTIONS", "/v1/completions")
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert before == (404, server.own.counts["requests405"] - 1)
    assert (answer.status, answer.getheader("allow")) == (405, "POST")
    assert error["message"] == "/v1/completions is for POST, not OPTIONS"
    assert error.keys() == {"message", "type", "param", "code"}


def test_metrics_count(server, client):
    answer = client.completions.create(model="tiny", prompt="The", max_tokens=3)

    def numbers():
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
        text = connection.getresponse().read().decode()
        connection.close()
        for line in text.splitlines():
            assert re.fullmatch(r'# TYPE \w+ \w+|\w+(\{status="\d+"\})? [\d.]+', line), line
        pairs = (line.split() for line in text.splitlines() if line[0] != "#")
        return {name.removeprefix("unsloth_cupy_"): float(value) for name, value in pairs}

    before = numbers()
    assert before["pages"] == PAGES
    assert before["free_pages"] <= PAGES
    client.completions.create(model="tiny", prompt="The", max_tokens=3)
    after = numbers()
    name = "completion_tokens_total"
    assert after[name] - before[name] == answer.usage.completion_tokens
    assert after['requests_total{status="200"}'] - before['requests_total{status="200"}'] == 2
    assert after["first_token_seconds_count"] - before["first_token_seconds_count"] == 1


def test_requests_to_another_name_are_refused_without_a_key(folder):
    model = models.load(folder)
    own = Server(
        model, Engine(model, rows=1, pages=8), name="tiny", limit=64, rows=1, queue=1,
        most_body=999, local=True,
    )  # fmt: skip
    with serving(own) as port:
        server = SimpleNamespace(port=port)
        body = BASE | {"max_tokens": 1}
        assert post(server, body, Host=f"localhost:{port}")[0] == 200
        assert post(server, body, Host=f"[::1]:{port}")[0] == 200
        status, answer = post(server, body, Host=f"example.com:{port}")
        assert status == 400
        assert "example.com" in answer["error"]["message"]
        assert post(server, b" " * 1000)[0] == 413


# ---- many clients ------------------------------------------------------------------------------
def test_200_requests_at_once_are_answered_as_alone(server):
    async def every():
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key=KEY, max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(*(
                client.completions.create(
                    model="tiny", prompt=f"The dog {number % 7}", max_tokens=1 + number % 9,
                    seed=number, temperature=0.8,
                )
                for number in range(200)
            ))  # fmt: skip

    answers = asyncio.run(every())
    for number in range(0, 200, 17):
        expected = server.model.generate_text(
            f"The dog {number % 7}", max_new_tokens=1 + number % 9, seed=number, temperature=0.8
        )
        assert answers[number].choices[0].text == expected
    assert settled(server) == (0, 0, 0, PAGES)


def leave(port, number):
    """Send a request, read a random part of its answer, and leave."""
    draw = random.Random(number)
    body = BASE | {"max_tokens": 100, "n": 1 + number % 3, "stream": number % 4 != 0}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    whole = head.encode() + data
    with socket.create_connection(("127.0.0.1", port), timeout=30) as own:
        sent = len(whole) if number % 5 else draw.randrange(len(whole))
        own.sendall(whole[:sent])
        if sent == len(whole) and body["stream"]:
            for _ in range(draw.randrange(4)):
                own.recv(200)
        time.sleep(draw.random() * 0.05)


def test_clients_that_leave_free_their_pages(server):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: leave(server.port, number), range(60)))
    computed = server.own.engine.computed_rows
    assert settled(server) == (0, 0, 0, PAGES)
    assert server.own.engine.computed_rows - computed < 60 * 100  # rows ended early
    assert post(server, BASE | {"max_tokens": 2})[0] == 200


def test_a_full_queue_answers_429(folder):
    model = models.load(folder)
    engine = Engine(model, rows=1, pages=64, page=4)
    own = Server(model, engine, name="tiny", limit=250, rows=1, queue=1, most_body=999)
    with serving(own) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as client:
            long = {"model": "tiny", "prompt": "The", "max_tokens": 200}
            long |= {"extra_body": {"min_tokens": 200}}
            streams = [client.completions.create(stream=True, **long) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as error:
                client.completions.create(**long)
            assert error.value.code == "queue_full"
            for stream in streams:
                stream.close()
            server = SimpleNamespace(own=own)
            assert settled(server) == (0, 0, 0, 64)
            client.completions.create(model="tiny", prompt="The", max_tokens=1)


def test_a_slow_reader_holds_no_pages(server):
    body = json.dumps(BASE | {"max_tokens": 100, "n": 8, "stream": True}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", body, headers)
    end = time.monotonic() + 30
    while time.monotonic() < end and not (server.own.rows and not server.own.worker.jobs):
        time.sleep(0.005)
        if not server.own.rows and not server.own.worker.jobs:
            break
    assert server.own.engine.free_pages == PAGES
    assert connection.getresponse().read().count(b"data: ") > 8
    connection.close()


def test_an_error_of_the_engine_ends_its_requests_alone(server, client, monkeypatch, capfd):
    def fail(*_):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "choose", fail)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="The")
        with pytest.raises(openai.APIError):
            [*client.completions.create(model="tiny", prompt="The", stream=True)]
    assert "none left" in capfd.readouterr().err
    assert client.completions.create(model="tiny", prompt="The", max_tokens=2).choices
    assert settled(server) == (0, 0, 0, PAGES)


def test_an_error_of_the_thread_is_answered(folder, monkeypatch, capfd):
    """Requests that are computed, and those that come later."""
    model = models.load(folder)
    engine = Engine(model, rows=1, pages=9, page=4)
    own = Server(model, engine, name="tiny", limit=30, rows=1, queue=9, most_body=999)
    monkeypatch.setattr(own.worker, "_step", lambda: 1 / 0)
    with serving(own) as port:
        server = SimpleNamespace(port=port)
        assert post(server, BASE | {"max_tokens": 1})[0] == 500
        assert post(server, BASE | {"max_tokens": 1})[0] == 503
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        for path, status in (("/health", 503), ("/metrics", 500)):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.read()
            assert answer.status == status
        connection.close()
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_logits_without_a_number_are_an_error(server, client, monkeypatch):
    monkeypatch.setattr(scheduler, "choose", lambda logits, rows, *_: np.full(len(rows), -1))
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.completions.create(model="tiny", prompt="The")


# ---- embeddings --------------------------------------------------------------------------------
def test_texts_are_embedded(tmp_path):
    folder = folder_of(tmp_path / "embeds", architectures=["LlamaModel"])
    model = models.load(folder)
    model.add_adapter(4, seed=0)
    model.adapter.parameters |= {n: a + 0.5 for n, a in model.adapter.parameters.items()}
    model.save_adapter(tmp_path / "adapter")
    model = models.load(folder)
    own = Server(model, None, name="embeds", limit=16, rows=1, queue=1, most_body=9999)
    with serving(own) as port, openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=60
    ) as client:  # fmt: skip
        texts = ["The cat", "Who sees the dog?"]
        expected = [model.embeddings(model.tokenizer.encode(text)[None])[0] for text in texts]
        for form in ("float", "base64"):
            answer = client.embeddings.create(model="embeds", input=texts, encoding_format=form)
            actual = [each.embedding for each in answer.data]
            if isinstance(actual[0], str):
                actual = [np.frombuffer(base64.b64decode(each), "<f4") for each in actual]
            np.testing.assert_array_equal(np.array(actual, np.float32), expected)
        model.load_adapter(tmp_path / "adapter", "other")
        answer = client.embeddings.create(model="other", input=texts[0], encoding_format="float")
        assert np.abs(answer.data[0].embedding - expected[0]).max() > 1e-3
        model.set_adapter("other")
        expected = model.embeddings(model.tokenizer.encode(texts[0])[None])[0]
        np.testing.assert_allclose(answer.data[0].embedding, expected, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="16 tokens"):
            client.embeddings.create(model="embeds", input="a " * 40)
        with pytest.raises(openai.BadRequestError, match="no head"):
            client.completions.create(model="embeds", prompt="a")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="embeds", input="a", dimensions=3)


# ---- the command -------------------------------------------------------------------------------
@contextlib.contextmanager
def started(folder, *options, **environment):
    """Start the command; yield its process, its first lines and its port."""
    words = [sys.executable, "-m", "unsloth_cupy", "serve", str(folder), "--port", "0", *options]
    own = os.environ | {"OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=own
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("curl"):
            break
    try:
        yield process, "".join(lines), int(re.search(r":(\d+)/v1", "".join(lines))[1])
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_answers_first(folder):
    with started(folder, "--rows", "2", "--tokens", "250") as (process, lines, port):
        name = re.escape(folder.name)
        assert re.search(rf"{name} on the CPU, float32\n", lines)
        assert "2 rows of at most 250 tokens; 256 answers may wait\n" in lines
        assert "KV cache of 8 pages, 512 tokens" in lines
        example = next(line for line in lines.splitlines() if line.startswith("curl"))
        answer = subprocess.run(
            example.replace("curl", "curl -s"), shell=True, capture_output=True, check=True
        )
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=60
        ) as client:  # fmt: skip
            options = {"model": folder.name, "prompt": "The", "max_tokens": 240, "stream": True}
            streams = [
                client.completions.create(extra_body={"min_tokens": 240}, **options)
                for _ in range(4)
            ]
            next(streams[0])
            process.send_signal(signal.SIGTERM)
            server, body = SimpleNamespace(port=port), {"model": folder.name, "prompt": "The"}
            statuses = set()
            while 503 not in statuses:
                statuses.add(post(server, body | {"max_tokens": 1})[0])
            assert statuses <= {200, 503}
            ends = [[*stream][-1].choices[0].finish_reason for stream in streams]
        assert ends == ["length"] * 4
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_a_second_signal_ends_the_command_at_once(folder):
    """Open requests get OpenAI's form of an error, or the end of their stream."""
    with started(folder, "--rows", "1") as (process, _, port):
        body = {"model": folder.name, "prompt": "The", "max_tokens": 600, "min_tokens": 600}
        server, connection = (
            SimpleNamespace(port=port),
            http.client.HTTPConnection("127.0.0.1", port),
        )
        with concurrent.futures.ThreadPoolExecutor(4) as pool, contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request(
                "POST", "/v1/completions", json.dumps(body | {"stream": True}), headers
            )
            stream = connection.getresponse()
            stream.read(40)
            answers = [pool.submit(post, server, body) for _ in range(3)]
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            results = [answer.result() for answer in answers]
            with pytest.raises(http.client.IncompleteRead):
                stream.read()
        assert [status for status, _ in results] == [503] * 3
        assert {each["error"]["type"] for _, each in results} == {"server_error"}
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("kind", ["gguf", "adapter"])
def test_files_and_adapters_are_served(folder, tmp_path, kind):
    target, names = tmp_path / "tiny.gguf", ["tiny"]
    options = ["--tokens", "64"]
    if kind == "gguf":
        models.export_gguf(folder, target)
    else:
        target, names = tmp_path / "adapter", ["tiny", "other"]
        model = models.load(folder)
        model.add_adapter(4, seed=0)
        model.save_adapter(target)
        options += ["--cache-dtype", "int8", "--name", "tiny", "--adapter", f"other={target}"]
    with started(target, *options) as (_, lines, port):
        assert lines.startswith("tiny on the CPU")
        assert ("adapter other\n" in lines) == (kind == "adapter")
        path, server = "/v1/chat/completions", SimpleNamespace(port=port)
        for name in names:
            body = {"model": name, "messages": ASKED, "max_tokens": 3}
            status, answer = post(server, body, path)
            assert status == 200, answer


def test_an_address_of_other_machines_needs_a_key(folder):
    words = [sys.executable, "-m", "unsloth_cupy", "serve", str(folder), "--host", "0.0.0.0"]
    environment = {n: v for n, v in os.environ.items() if n != command.KEY}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "set UNSLOTH_CUPY_API_KEY" in done.stderr
    with started(folder, "--host", "0.0.0.0", "--rows", "1", **{command.KEY: "k"}) as (
        _,
        lines,
        port,
    ):
        assert "Bearer $UNSLOTH_CUPY_API_KEY" in lines
        server = SimpleNamespace(port=port)
        body = {"model": folder.name, "prompt": "The", "max_tokens": 1}
        assert [post(server, body, key=key)[0] for key in ("k", "l")] == [200, 401]
        words[-1] = "127.0.0.1"
        done = subprocess.run(
            [*words, "--port", str(port)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert re.search(r"cannot listen on .*; choose another --port", done.stderr)
