"""`serve` with a tiny model and real clients: OpenAI's package, many at once, ones that leave, and lm-eval."""

import asyncio
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

from tests import chat_model
from tests.chat_model import END, answer, text_of
from toolkit.__main__ import main
from toolkit.interchange.reading import load_tokenizer
from toolkit.offload.cached_model import CachedModel
from toolkit.offload.chat_template import tokens_of
from toolkit.offload.generation import Reuse, Writer
from toolkit.offload.model import OffloadedModel
from toolkit.serving.app import BODY_BYTES, make_app
from toolkit.serving.server import StoppingServer
from toolkit.serving.worker import StoppedError, Worker

MESSAGES = [{"role": "user", "content": "5 6"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model, folder = chat_model.make(tmp_path_factory.mktemp("serve") / "tiny")
    return model, folder, load_tokenizer(folder / "model")


@pytest.fixture(scope="module")
def writer(tiny):
    with OffloadedModel.open(tiny[1]) as opened:
        yield Writer(CachedModel(opened), tiny[2], {END}, 200, Reuse.ALONE)


@contextmanager
def running(app):
    """The address of a server in a thread of its own."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = StoppingServer(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def client_of(address, token="none", **settings):
    return openai.OpenAI(base_url=address, api_key=token, max_retries=0, **settings)


@pytest.fixture(scope="module")
def address(writer):
    with running(make_app(writer, "tiny", None, 64)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return client_of(address)


def completion(client, prompt, **more):
    return client.completions.create(**({"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 9} | more))


def chat(client, messages=MESSAGES, **more):
    return client.chat.completions.create(**({"model": "tiny", "messages": messages, "temperature": 0} | more))


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("other")


def test_completions_are_the_likeliest_text(client, tiny):
    model, _, tokenizer = tiny
    expected = [text_of(tokenizer, prompt, answer(model, prompt, 9)) for prompt in ([5, 6], [11])]
    for prompts in (["5 6", "11"], [[5, 6], [11]]):
        found = completion(client, prompts)
        assert [choice.text for choice in found.choices] == expected
    assert completion(client, "11").choices[0].text == completion(client, [11]).choices[0].text == expected[1]
    usage = found.usage
    assert (usage.prompt_tokens, usage.total_tokens - usage.completion_tokens) == (3, 3)
    reasons = ["length" if len(answer(model, prompt, 9)) == 9 else "stop" for prompt in ([5, 6], [11])]
    assert [choice.finish_reason for choice in found.choices] == reasons
    streamed = list(completion(client, ["5 6", "11"], stream=True, stream_options={"include_usage": True}))
    for index, text in enumerate(expected):
        parts = [choice.text for chunk in streamed for choice in chunk.choices if choice.index == index]
        assert "".join(parts) == text
        assert len(parts) > 1
    assert streamed[-1].usage == usage


def test_logarithms_of_probabilities_are_those_of_the_model(client, tiny):
    model, _, tokenizer = tiny
    prompt = [5, 6, 11, 7]
    made = answer(model, prompt, 2, ends=())
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[*prompt, *made]])).logits[0].log_softmax(-1)
    found = completion(client, prompt, echo=True, logprobs=2, max_tokens=2).choices[0]
    assert found.text == tokenizer.decode([*prompt, *made])
    scores = found.logprobs
    assert scores.tokens == [tokenizer.decode([token]) for token in [*prompt, *made]]
    assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
    for at, token in enumerate([*prompt, *made][1:]):
        assert scores.token_logprobs[at + 1] == pytest.approx(float(expected[at, token]), abs=1e-4)
        best = expected[at].topk(2)
        for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert scores.top_logprobs[at + 1][tokenizer.decode([index])] == pytest.approx(value, abs=1e-4)
    pieces = list(completion(client, prompt, logprobs=2, max_tokens=2, stream=True))
    offsets = [at for piece in pieces for part in piece.choices if part.logprobs for at in part.logprobs.text_offset]
    assert offsets == completion(client, prompt, logprobs=2, max_tokens=2).choices[0].logprobs.text_offset
    assert offsets[1] > 0
    alone = completion(client, prompt, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert alone.logprobs.token_logprobs == scores.token_logprobs[:4]
    (entry,) = chat(client, max_tokens=1, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert entry.logprob == max(best.logprob for best in entry.top_logprobs)
    assert len(entry.top_logprobs) == 3


def test_a_conversation_is_answered_whole_and_streamed(client, tiny):
    model, _, tokenizer = tiny
    prompt = tokens_of(tokenizer, MESSAGES)
    expected = text_of(tokenizer, prompt, answer(model, prompt, 100))
    found = chat(client)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (expected, "stop")
    parts = [chunk.choices[0] for chunk in chat(client, stream=True)]
    assert "".join(part.delta.content for part in parts) == expected
    assert [parts[0].delta.role, parts[-1].finish_reason] == ["assistant", "stop"]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "5"}, {"type": "text", "text": " 6"}]}]
    assert chat(client, in_parts).choices[0].message.content == expected
    stopped = chat(client, stop=[expected[6:9]]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (expected[:6], "stop")
    drawn = [chat(client, temperature=1, seed=seed, max_tokens=9).choices[0].message.content for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_twenty_clients_at_once_get_what_each_gets_alone(client, address):
    """Beginnings that they share, conversations, texts with scores, and streams."""

    def asked(number, client):
        if number % 4 == 3:
            return completion(client, [5, 6, number], echo=True, logprobs=1, max_tokens=3).choices[0].model_dump()
        more = {"temperature": number % 2, "seed": number, "max_tokens": 12}
        messages = [{"role": "user", "content": f"5 6 {number // 5}"}]
        if number % 4 == 2:
            return "".join(chunk.choices[0].delta.content for chunk in chat(client, messages, stream=True, **more))
        return chat(client, messages, **more).choices[0].message.content

    alone = [asked(number, client) for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda number: asked(number, client_of(address)), range(20)))
    assert together == alone
    assert len(set(map(str, alone))) > 10


@pytest.fixture
def held(monkeypatch):
    """Each step of the model waits for `go`; `steps` counts them."""
    step, go, steps = CachedModel.step, threading.Semaphore(0), []

    def waits(self, token):
        steps.append(token)
        go.acquire(timeout=20)
        return step(self, token)

    monkeypatch.setattr(CachedModel, "step", waits)
    return go, steps


def until(true):
    """Wait for a condition for some seconds."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_is_status_429(writer, held):
    go, steps = held
    with running(make_app(writer, "tiny", None, 1)) as address, ThreadPoolExecutor(2) as pool:
        client = client_of(address)
        first = pool.submit(completion, client, "5")
        until(lambda: steps)
        second = pool.submit(completion, client, "6")
        time.sleep(0.5)
        with pytest.raises(openai.RateLimitError, match="1 requests wait already"):
            completion(client, "7")
        go.release(100)
        assert first.result().choices[0].text
        assert second.result().choices[0].text


def test_a_worker_that_closes_ends_the_works_that_wait():
    """The first one is under way until it is cancelled; the others never begin, and say so."""
    begun = threading.Event()

    def compute(_, cancelled):
        begun.set()
        until(cancelled)
        yield "part"

    async def closed():
        worker = Worker(None, 4)
        works = [worker.submit(compute) for _ in range(3)]
        await asyncio.to_thread(begun.wait)
        await asyncio.to_thread(worker.close)
        with pytest.raises(StoppedError):
            worker.submit(compute)
        assert [part async for part in works[0]] == ["part"]
        for work in works[1:]:
            with pytest.raises(StoppedError):
                await anext(work)

    asyncio.run(asyncio.wait_for(closed(), 30))


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_the_end_of_the_server_cuts_off_says_so(writer, held, stream):
    go, steps = held
    with ThreadPoolExecutor(1) as pool, running(make_app(writer, "tiny", None, 4)) as address:
        asked = pool.submit(lambda: list(completion(client_of(address), "5 6", max_tokens=90, stream=stream)))
        until(lambda: steps)
        threading.Timer(0.3, go.release, [200]).start()  # while the server stops
    with pytest.raises(openai.APIError, match="the server is stopping: this answer is not whole"):
        asked.result()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_computation(writer, held, stream):
    go, steps = held
    with running(make_app(writer, "tiny", None, 4)) as address:
        body = {"model": "tiny", "prompt": "5 6", "temperature": 0, "max_tokens": 90, "stream": stream}
        with (
            httpx.Client() as client,
            client.stream("POST", f"{address}/completions", json=body) if stream else (ThreadPoolExecutor(1)) as answer,
        ):
            if stream:
                next(answer.iter_lines())
            else:
                leaves = answer.submit(httpx.post, f"{address}/completions", json=body, timeout=0.5)
                until(lambda: steps)
                with pytest.raises(httpx.ReadTimeout):
                    leaves.result()
        time.sleep(0.6)
        go.release(200)
        assert completion(client_of(address), "11", max_tokens=1).choices[0].text
        assert len(steps) < 5


WRONG = [
    ("/completions", {"content": b"[" * 100_000}, 400, "body"),
    ("/completions", {"json": {"model": "tiny", "prompt": [5, -1]}}, 400, "prompt.1: Input should be greater than"),
    ("/completions", {"json": {"model": "tiny", "prompt": [500]}}, 400, "token ids from 500 to 500"),
    ("/completions", {"json": {"model": "tiny", "prompt": [1] * 300}}, 400, "300 tokens fills the context of 200"),
    ("/completions", {"json": {"model": "tiny", "prompt": [1] * 300, "stream": True}}, 400, "fills the context"),
    ("/completions", {"json": {"model": "tiny", "prompt": "5", "n": 2}}, 400, "n is not supported"),
    ("/completions", {"json": {"model": "tiny", "prompt": "5", "min_tokens": 9}}, 400, "min_tokens is not supported"),
    ("/completions", {"json": {"model": "tiny", "prompt": "5", "guided_json": {}}}, 400, "guided_json is not"),
    ("/chat/completions", {"json": {"model": "tiny", "messages": MESSAGES, "echo": True}}, 400, "echo is not"),
    ("/completions", {"json": {"model": "gpt", "prompt": "5"}}, 404, "this server has 'tiny'"),
    ("/completions", {"content": b" " * (BODY_BYTES + 1)}, 413, "shorter prompt"),
    ("/completions", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "application/json"),
    ("/chat/completions", {"json": {"model": "tiny", "messages": MESSAGES, "tools": [{}]}}, 400, "tools is not"),
]


@pytest.mark.parametrize(("path", "given", "status", "words"), WRONG)
def test_errors_have_the_shape_of_openai(address, path, given, status, words):
    found = httpx.post(f"{address}{path}", **({"headers": {"Content-Type": "application/json"}} | given))
    assert found.status_code == status
    error = found.json()["error"]
    assert words in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


def test_a_failure_of_the_server_is_status_500_and_the_next_request_is_answered(writer, client, monkeypatch):
    prefill = CachedModel.prefill
    monkeypatch.setattr(CachedModel, "prefill", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="its log says more"):
        completion(client, "5")
    monkeypatch.setattr(CachedModel, "prefill", prefill)
    assert completion(client, "5").choices[0].text


def test_a_token_is_demanded(writer):
    client = TestClient(make_app(writer, "tiny", "secret", 4))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s\xe9cret".encode("latin-1")}):
        found = client.get("/v1/models", headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_command_serves_a_folder_within_a_limit(tiny, capfd, monkeypatch):
    found = []

    def run(server, sockets):
        with TestClient(server.config.app, headers={"Authorization": "Bearer secret"}) as client:
            body = {"model": "packed", "prompt": "5 6", "max_tokens": 2, "temperature": 0}
            found.append((sockets[0].getsockname(), client.post("/v1/completions", json=body).json()))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tiny[1]), "--port", port]) == 2
        assert "take another port" in capfd.readouterr().err
    options = ["--host", "0.0.0.0", "--port", port, "--context", "100", "--memory", "4GB", "--queue", "2"]
    assert main(["serve", str(tiny[1]), *options]) == 2
    assert "--host 0.0.0.0: others can reach it; add --token" in capfd.readouterr().err
    assert main(["serve", str(tiny[1]), *options, "--token", "secret", "--dram", "50MB"]) == 0
    assert "(100 tokens of context)" in (said := capfd.readouterr().err)
    assert " of 4000 MB" in said
    ((where, body),) = found
    assert where == ("0.0.0.0", int(port))
    assert body["choices"][0]["text"] == text_of(tiny[2], [5, 6], answer(tiny[0], [5, 6], 2))


def test_a_developers_message_is_the_systems(client):
    texts = [
        chat(client, [{"role": role, "content": "12"}, *MESSAGES], max_tokens=9).choices[0].message.content
        for role in ("system", "developer")
    ]
    assert texts[0] == texts[1]


def test_a_missing_package_is_a_line_with_the_command_that_installs_it(tiny, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tiny[1])]) == 2
    assert "pip install 'sparse-offload-toolkit[serve]'" in capfd.readouterr().err


@pytest.mark.slow
def test_the_accuracy_of_lm_eval_is_that_of_hflm(address, tiny, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    model, folder, tokenizer = tiny
    numbers = torch.randint(1, 90, (40, 7), generator=torch.Generator().manual_seed(0)).tolist()
    items = [
        {"query": f"{a} {b} {c}", "choices": [f"{d} {e}", f"{f}", f"{g}"], "gold": a % 3}
        for a, b, c, d, e, f, g in numbers
    ]
    (tmp_path / "items.json").write_text("\n".join(map(json.dumps, items)))
    task = {
        "task": "numbers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.json")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }
    remote = LocalCompletionsAPI(
        base_url=f"{address}/completions",
        model="tiny",
        tokenizer=str(folder / "model"),
        tokenizer_backend="huggingface",
    )
    models = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), remote
    manager = TaskManager(include_defaults=False)
    found = [simple_evaluate(it, tasks=[task], task_manager=manager, bootstrap_iters=0) for it in models]
    answers = [[sample["filtered_resps"] for sample in one["samples"]["numbers"]] for one in found]
    for here, there in zip(*answers, strict=True):
        assert [greedy for _, greedy in here] == [greedy for _, greedy in there]
        assert [value for value, _ in here] == pytest.approx([value for value, _ in there], abs=1e-3)
    assert found[0]["results"]["numbers"]["acc,none"] == found[1]["results"]["numbers"]["acc,none"]
