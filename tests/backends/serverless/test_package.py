"""Packages as their platforms take them: the files' schema, and the entry point started here in the folder alone."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest
import yaml

from helpers import command
from played import played, request
from rollart.backends.serverless.package import TARGETS, write_package
from rollart.core.errors import ConfigError
from rollart.rewards.contract import read_answers, to_json

OWN = '''from helpers_of_mine import bonus
from rollart.core.types import Score
from rollart.rewards import domains

def reward(request):
    score = domains.REWARDS[request.domain](request)
    return Score(score.value + bonus(request), score.success, score.parts)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A reward of one's own: a package with two modules, and its requirements."""
    folder = tmp_path / "work" / "my_rewards"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "main_one.py").write_text(OWN.replace("helpers_of_mine", "my_rewards.helpers_of_mine"))
    (folder / "helpers_of_mine.py").write_text("def bonus(request):\n    return len(request.messages) / 1000\n")
    (folder.parent / "requirements.txt").write_text("# nothing\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield "my_rewards.main_one:reward"
    for name in [name for name in sys.modules if name.startswith("my_rewards")]:
        del sys.modules[name]


@contextmanager
def started(arguments, folder, ready, **variables):
    """A process in the folder, with nothing of this checkout on its path; `ready` is in the line that says so."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([sys.executable, "-u", *arguments], cwd=folder, env={**clean, **variables}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if ready in line:
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield said[-1]
    finally:
        process.terminate()
        process.wait(10)


def post(url, body):
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
        return answer.read()


def scores(url, requests):
    return [read_answers(post(url, json.dumps(to_json(r)).encode()), 1, batch=False)[0].score for r in requests]


def answering(url, seconds=30):
    """What a GET is told, once somebody listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(url, timeout=10).read()
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def free_port():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def dockers_command(folder):
    """The Dockerfile's CMD, run in the folder on a port of ours."""
    return json.loads(re.search(r"^CMD (.*)$", (folder / "Dockerfile").read_text(), re.M)[1])[1:]


def test_functions_framework_and_the_packaged_server_give_the_same_200_scores(tmp_path, mine):
    requests = [asked for asked, _ in played(200)]
    folder, port = tmp_path / "package", free_port()
    write_package(mine, "cloud-run", folder)
    served = command("reward", "serve", mine, "--port", port)[1:]
    with started(served, tmp_path / "work", "serving", PYTHONPATH=os.environ.get("PYTHONPATH", "")):
        assert json.loads(answering(f"http://127.0.0.1:{port}"))["ready"]
        framework = scores(f"http://127.0.0.1:{port}", requests)
    with started([*dockers_command(folder), "--port", "0"], folder, "listening on") as line:
        packaged = scores(line.split("listening on ")[1].strip().replace("0.0.0.0", "127.0.0.1"), requests)
    assert framework == packaged
    assert [s.value for s in packaged] == pytest.approx(
        [score.value + len(asked.messages) / 1000 for asked, score in played(200)])
    assert len({score.value for score in packaged}) > 10


@pytest.mark.parametrize("target", ["cloud-run", "knative", "function-compute"])
def test_a_container_starts_by_its_command_on_the_platforms_port_and_serves(target, tmp_path, mine):
    files = write_package(mine, target, tmp_path / "package", concurrency=3, seconds=30)
    text = (tmp_path / "package" / "Dockerfile").read_text()
    port = {"function-compute": 9000}.get(target, 8080)
    assert f"PORT={port}" in text
    assert {"Dockerfile", "requirements.txt", "main.py", "README.md", "my_rewards/main_one.py"} <= set(files)
    ours = free_port()
    with started(dockers_command(tmp_path / "package"), tmp_path / "package", "listening on", PORT=str(ours)) as line:
        assert str(ours) in line
        assert scores(f"http://127.0.0.1:{ours}/any/path", [played(3)[0][0]])[0].parts


def test_the_knative_service_has_what_knative_requires(tmp_path, mine):
    write_package(mine, "knative", tmp_path / "p", concurrency=3, seconds=30)
    service = yaml.safe_load((tmp_path / "p" / "service.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("serving.knative.dev/v1", "Service")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service["metadata"]["name"])
    template = service["spec"]["template"]
    assert template["metadata"]["annotations"]["autoscaling.knative.dev/min-scale"] == "0"
    assert (template["spec"]["containerConcurrency"], template["spec"]["timeoutSeconds"]) == (3, 30)
    (container,) = template["spec"]["containers"]
    assert container["ports"] == [{"containerPort": 8080}]
    assert container["image"]


def test_the_function_compute_file_has_what_its_schema_requires(tmp_path, mine):
    write_package(mine, "function-compute", tmp_path / "p", concurrency=3, seconds=30)
    plain = yaml.safe_load((tmp_path / "p" / "s.yaml").read_text())
    assert plain["edition"] == "3.0.0"
    resource = plain["resources"]["reward"]
    props = resource["props"]
    assert resource["component"] == "fc3"
    assert {"region", "functionName", "runtime", "customContainerConfig"} <= set(props)
    assert (props["runtime"], props["timeout"]) == ("custom-container", 30)
    assert props["customContainerConfig"]["port"] == 9000
    assert props["memorySize"] % 64 == 0
    assert 1 <= props["instanceConcurrency"] <= 100
    assert props["diskSize"] in (512, 10240)
    (trigger,) = props["triggers"]
    assert set(trigger) == {"triggerName", "triggerType", "triggerConfig"}
    assert set(trigger["triggerConfig"]["methods"]) <= {"GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS"}


def test_the_lambda_template_names_a_handler_that_lambdas_own_runtime_client_runs(tmp_path, mine):
    pytest.importorskip("awslambdaric")
    folder = tmp_path / "package"
    write_package(mine, "lambda", folder, seconds=30)
    template = yaml.load((folder / "template.yaml").read_text().replace("!Ref ", ""), yaml.SafeLoader)
    assert template["Transform"] == "AWS::Serverless-2016-10-31"
    (resource,) = template["Resources"].values()
    assert resource["Type"] == "AWS::Serverless::Function"
    properties = resource["Properties"]
    assert re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", properties["FunctionName"])
    assert (properties["CodeUri"], properties["Timeout"]) == (".", 30)
    asked, score = played(3)[0]
    with runtime_api() as (address, events, answers):
        process = subprocess.Popen([sys.executable, "-m", "awslambdaric", properties["Handler"]], cwd=folder,
                                   env={**os.environ, "AWS_LAMBDA_RUNTIME_API": address, "PYTHONPATH": ""})
        try:
            events.put(to_json(asked))
            direct = answers.get(timeout=30)
            events.put({"version": "2.0", "body": json.dumps(to_json(asked)), "isBase64Encoded": False})
            over_http = answers.get(timeout=30)
        finally:
            process.kill()
            process.wait()
    assert direct["score"]["value"] == pytest.approx(score.value + len(asked.messages) / 1000)
    assert over_http["statusCode"] == 200
    assert json.loads(over_http["body"])["score"] == direct["score"]


@contextmanager
def runtime_api():
    """Lambda's runtime API, as far as its client needs it: the next event, and what became of it."""
    events, answers = Queue(), Queue()

    class Api(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            out = json.dumps(events.get()).encode()
            self.send_response(200)
            for name, value in (("Lambda-Runtime-Aws-Request-Id", "1"), ("Lambda-Runtime-Deadline-Ms", "9999999999999"),
                                ("Lambda-Runtime-Invoked-Function-Arn", "arn"), ("Content-Type", "application/json"),
                                ("Content-Length", len(out))):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(out)

        def do_POST(self):
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", events, answers
    finally:
        events.put({})
        server.shutdown()


@pytest.mark.parametrize("target", TARGETS)
def test_a_shipped_reward_is_packaged_without_anything_of_the_users(target, tmp_path):
    files = write_package("guess", target, tmp_path / "p")
    assert not [file for file in files if not file.startswith("rollart/") and "/" in file]
    assert (tmp_path / "p" / "requirements.txt").read_text() == ""
    imported = subprocess.run([sys.executable, "-S", "-c", "import main; print(main.handler({'version': 1}))"],
                              cwd=tmp_path / "p", capture_output=True, text=True, check=True, env={})
    assert "the request has no" in imported.stdout


@pytest.mark.parametrize(("function", "target", "says"), [
    ("guess", "azure", "--target must be one of cloud-run, knative, lambda, function-compute; got 'azure'"),
    ("gess", "lambda", "no reward 'gess'"), ("json:loads", "lambda", "a module of Python itself"),
    ("reward_functions:unit_tests", "lambda", "needs a sandbox"),
    ("reward_functions:two_arguments", "lambda", "must take one argument")])
def test_what_cannot_be_packaged_is_told_and_nothing_is_written(function, target, says, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(says)):
        write_package(function, target, tmp_path / "p")
    assert not (tmp_path / "p" / "main.py").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        write_package("guess", "lambda", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_first_request_of_a_server_is_cold_and_a_served_function_is_asked_again_by_key(tmp_path):
    with started(["-m", "rollart.rewards.server", "guess", "--port", "0"], tmp_path, "listening on",
                 PYTHONPATH=os.environ.get("PYTHONPATH", "")) as line:
        url, body = line.split("listening on ")[1].strip(), json.dumps(to_json(request(1))).encode()
        first, again = json.loads(post(url, body)), json.loads(post(url, body))
    assert (first["instance"]["cold"], again["instance"]["cold"]) == (True, False)
    assert first["score"] == again["score"]
    assert first["timings"] == again["timings"], "kept, not computed again"
