"""`umbel deploy` on a Ray that it starts on this machine: replicas that serve, die, come back, and change in number."""

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from ...serving import ServerProcess, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed; make ray installs the extra umbel[ray] in an environment of its own",
    ),
]
LONG_PATIENCE = 900.0  # seconds; Ray starts a dozen processes, and a replica imports torch three times
KEY, ADMIN_KEY = "sk-the-team", "sk-the-admin"
COMMON = ["--cpus-per-replica", "0.1", "--api-key", f"team={KEY}", "--admin-key", ADMIN_KEY]
SERVES = r"ready: umbel on (http://[\d.]+:\d+)"
_PROGRAM = "import sys; from umbel.interpreter.cli import main; sys.exit(main(sys.argv[1:]))"


class Deployment(ServerProcess):
    """A deployment with the Ray that it has started."""

    def __init__(self, model: str, *options: str) -> None:
        options = (model, "--address", "local", *COMMON, *options)
        super().__init__(*options, command="deploy", listens=SERVES, patience=LONG_PATIENCE)

    def replicas(self) -> dict[int, psutil.Process]:
        """Process id → process of each actor that is a replica."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {each.pid: each for each in found if _title(each).startswith("ray::ServeReplica:umbel:Replica")}

    def deploy_again(self, model: str, *options: str) -> None:
        """Changes the application by a second command, as on a cluster."""
        address = self.said(r"Ray is at (\S+);")
        command = [sys.executable, "-c", _PROGRAM, "deploy", model, "--address", address, *COMMON, *options]
        done = subprocess.run(
            command, check=False, timeout=LONG_PATIENCE, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.address}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": LONG_PATIENCE, **options}
        )

    def read(self, path: str, body: Any = None) -> bytes:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=LONG_PATIENCE) as answer:
            found: bytes = answer.read()
            return found

    def ask(self, path: str, body: Any = None) -> Any:
        return json.loads(self.read(path, body))

    def metrics(self) -> str:
        return self.read("/metrics").decode()

    def placed_on(self, prompt: str, tokens: int = 1) -> str:
        """Returns the name of the replica that answers a prompt."""
        return complete(self.client(), prompt, tokens)[1]

    def names(self, count: int) -> set[str]:
        """Waits until calls are placed on so many replicas. Returns their names."""
        numbers = itertools.count()

        def seen() -> set[str] | None:
            with ThreadPoolExecutor(2 * count) as threads:
                prompts = [f"{next(numbers)} who is there? " * 20 for _ in range(2 * count)]
                found = set(threads.map(self.placed_on, prompts))
            return found if len(found) == count else None

        found: set[str] = until(seen, f"{count} replicas answer no calls", LONG_PATIENCE)
        return found

    def stop(self) -> None:
        """Ends it as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(LONG_PATIENCE)
        finally:
            self.end()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def complete(client: openai.OpenAI, prompt: str, tokens: int) -> tuple[str, str]:
    """Returns the text of an answer, and the replica that gave it."""
    answer = client.completions.with_raw_response.create(
        model="oracle", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.parse().choices[0].text, answer.headers["umbel-placement"].partition(":")[0]


def stream(client: openai.OpenAI, prompt: str, tokens: int, on_first: Callable[[], None]) -> tuple[str, bool]:
    """Returns the text that came, and whether its end did."""
    text = ""
    try:
        for event in client.completions.create(
            model="oracle",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            if not text and event.choices[0].text:
                on_first()
            text += event.choices[0].text
            if event.choices[0].finish_reason:
                return text, True
    except openai.APIError as error:
        if "lost" not in str(error):
            raise
    return text, False


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    found = Deployment("oracle", "--replicas", "2")
    try:
        yield found
        found.stop()
        assert found.process.returncode == 0
    finally:
        found.end()


def results(calls: Sequence["Future[Any]"]) -> list[Any]:
    return [each.result(LONG_PATIENCE) for each in calls]


def test_two_replicas_serve_clients_as_a_server_does(deployment: Deployment) -> None:
    client = deployment.client()
    assert [model.id for model in client.models.list()] == ["oracle"]
    assert len(deployment.names(2)) == 2
    prompt = "a prompt that all begin with, and that is cached after the first; " * 10
    answers = [complete(client, prompt, 8) for _ in range(4)]
    assert len(set(answers)) == 1  # the same text of the same replica
    assert stream(client, prompt, 8, lambda: None) == (answers[0][0], True)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="hello")
    with pytest.raises(openai.AuthenticationError):
        deployment.client(api_key="sk-wrong").completions.create(model="oracle", prompt="hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="oracle", prompt="hello", temperature=-1)
    with pytest.raises(openai.PermissionDeniedError):
        client.post("/../flush_cache", cast_to=object)
    assert deployment.ask("/flush_cache", {})["evicted"] >= 0
    assert deployment.ask("/health") == {"status": "ok"}
    assert set(re.findall(r'umbel_running{replica="(\w+)"}', deployment.metrics())) == deployment.names(2)


def test_programs_run_on_it_through_an_endpoint(deployment: Deployment) -> None:
    program = f"""
import umbel as ul

@ul.function
def answers(s, question):
    s += "Question: " + question
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f" Answer {{number}}:" + ul.gen("answer", max_tokens=6, temperature=0)
    s += " and ".join(fork["answer"] for fork in forks)

model = ul.RuntimeEndpoint({deployment.address!r}, server="umbel", api_key={KEY!r})
print(len(answers.run("why?", backend=model).text()) > 20, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=LONG_PATIENCE
    )
    assert done.stdout.strip() == "True", done.stderr


def test_a_replica_that_is_killed_loses_no_call_that_had_not_begun_and_comes_back(deployment: Deployment) -> None:
    first = deployment.names(2)
    client = deployment.client()
    prompts = [f"{number} asks something of its own; " * 8 for number in range(16)]
    expected = [complete(client, prompt, 300)[0] for prompt in prompts]
    deployment.ask("/flush_cache", {})
    victim = min(deployment.replicas())
    with ThreadPoolExecutor(32) as threads:
        started = [Future[None]() for _ in prompts]

        def streamed(number: int) -> tuple[str, bool]:
            return stream(client, prompts[number], 300, lambda: started[number].set_result(None))

        begun = [threads.submit(streamed, number) for number in range(len(prompts))]
        for each in started:
            each.result(LONG_PATIENCE)
        waiting = [threads.submit(complete, client, prompt, 300) for prompt in prompts]
        until(lambda: all(each.running() for each in waiting), "the calls are not sent", LONG_PATIENCE)
        os.kill(victim, signal.SIGKILL)
        answers, streams = results(waiting), results(begun)
    assert [text for text, _ in answers] == expected
    for (text, ended), whole in zip(streams, expected, strict=True):
        assert text == whole if ended else whole.startswith(text)
    until(lambda: victim not in deployment.replicas(), "the killed process is still there", LONG_PATIENCE)
    until(lambda: len(deployment.replicas()) == 2, "no new replica was started", LONG_PATIENCE)
    assert deployment.names(2) != first


def test_a_new_deployment_replaces_replicas_and_loses_no_call(deployment: Deployment) -> None:
    before = deployment.names(2)
    lost, ended = keep_calling(deployment, lambda: deployment.deploy_again("oracle", "--replicas", "2"))
    assert (lost, ended > 0) == ([], True)
    assert not deployment.names(2) & before


def test_replicas_follow_the_load_up_and_down_without_a_lost_call(deployment: Deployment) -> None:
    delays = ["--up-delay", "0", "--down-delay", "2", "--calls-per-replica", "2"]
    deployment.deploy_again("oracle", "--replicas", "1:2", *delays)
    until(lambda: len(deployment.replicas()) == 1, "it does not begin with one", LONG_PATIENCE)

    def both_ways() -> None:
        with ThreadPoolExecutor(8) as threads:
            client, busy = deployment.client(), True

            def load(number: int) -> None:
                for turn in itertools.count():
                    if not busy:
                        return
                    complete(client, f"{number}, {turn}: " * 20, 100)

            loads = [threads.submit(load, number) for number in range(8)]
            until(lambda: len(deployment.replicas()) == 2, "no second replica came", LONG_PATIENCE)
            deployment.names(2)
            busy = False
            results(loads)
        until(lambda: len(deployment.replicas()) == 1, "the second replica did not end", LONG_PATIENCE)

    lost, ended = keep_calling(deployment, both_ways, callers=1)
    assert (lost, ended > 0) == ([], True)


def keep_calling(deployment: Deployment, work: Callable[[], None], callers: int = 4) -> tuple[list[str], int]:
    """Calls all the time while the work is done → what the calls failed with, and how many ended well."""
    client, going, lost, ended = deployment.client(), True, [], 0

    def calls(number: int) -> None:
        nonlocal ended
        for turn in itertools.count():
            if not going:
                return
            prompt = f"caller {number} asks for the {turn}th time; " * 4
            try:
                if turn % 2:
                    complete(client, prompt, 40)
                else:
                    assert stream(client, prompt, 40, lambda: None)[1], "a stream broke off"
                ended += 1
            except Exception as error:
                lost.append(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(callers) as threads:
        running = [threads.submit(calls, number) for number in range(callers)]
        try:
            work()
        finally:
            going = False
        results(running)
    return lost, ended


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["oracle", "--gpus-per-replica", "1000"], "--gpus-per-replica 1"),
        (["/nowhere/model.gguf"], "ModelError: there is no model, folder or file '/nowhere/model.gguf'"),
    ],
)
def test_what_cannot_start_is_said_in_a_line(given: list[str], said: str) -> None:
    command = [sys.executable, "-c", _PROGRAM, "deploy", *given, "--address", "local", "--port", "0"]
    done = subprocess.run(
        command, check=False, timeout=LONG_PATIENCE, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_the_same_request_three_times_is_computed_by_one_replica() -> None:
    """The first experiment of SGLang's router: 7 new tokens and 1 cached, 1 and 7, 1 and 7; the other replica idles.

    The one cached token of the first request is BOS, which earlier requests have brought to both replicas.
    """
    deployment = Deployment("default", "--replicas", "2", "--pool-tokens", "4096")
    try:
        ready = before = counted(deployment)
        while not all(before[name] > ready[name] for name in ready):
            before = generate(deployment, os.urandom(16).hex(), before)
        found = []
        for _ in range(3):
            after = generate(deployment, "What is the capital of France?", before)
            found.append({name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after})
            before = after
        (one,) = {name for each in found for name in each if each[name] != (0, 0)}
        assert [each[one] for each in found] == [(7, 1), (1, 7), (1, 7)]
        deployment.stop()
    finally:
        deployment.end()


Counted = dict[str, tuple[int, int]]  # replica → tokens of prompts that it has computed, and found in its cache


def counted(deployment: Deployment) -> Counted:
    text = deployment.metrics()
    computed, cached = (
        dict(re.findall(rf'^umbel_{name}_total{{replica="(\w+)"}} (\S+)', text, re.MULTILINE))
        for name in ("computed_prompt_tokens", "cached_tokens")
    )
    return {name: (int(float(computed[name])), int(float(cached[name]))) for name in computed}


def generate(deployment: Deployment, text: str, before: Counted) -> Counted:
    """Has some replica answer a prompt. Returns the counts with its tokens, of which engines tell twice a second."""
    answer = deployment.ask("/generate", {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    tokens = sum(map(sum, before.values())) + answer["meta_info"]["prompt_tokens"]

    def now() -> Counted | None:
        found = counted(deployment)
        return found if sum(map(sum, found.values())) >= tokens else None

    found: Counted = until(now, "the request is not counted")
    return found
