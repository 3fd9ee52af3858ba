"""A folder that deploys a reward function as it is: source, entry point, platform's own file, README.

Keeps true: the folder needs nothing from where it was made: it carries the user's module (or its package), the few
standard-library-only files of RollArt that serve it, and a requirements.txt beside them if the user has one; the
function is loaded once before anything is written. Waits for nothing.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import rollart
from rollart.core.errors import ConfigError
from rollart.rewards.domains import REWARDS, reward_function

TARGETS = ("cloud-run", "knative", "lambda", "function-compute")
SERVING = ("__init__.py", "core/__init__.py", "core/errors.py", "core/tokens.py", "core/types.py",
           "rewards/__init__.py", "rewards/contract.py", "rewards/domains.py", "rewards/handler.py",
           "rewards/judge.py", "rewards/mix.py", "rewards/server.py")
"""What serves a function: standard library only; a test imports them alone."""

DOCKERFILE = """FROM python:3.12-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
ENV PYTHONUNBUFFERED=1 PORT={port}
USER nobody
CMD ["python", "-m", "rollart.rewards.server", "{function}", "--host", "0.0.0.0", "--concurrency", "{concurrency}"]
"""

ENTRY = '''"""Entry point: `handler` for events (Lambda, Function Compute), `reward` for functions-framework."""

from rollart.rewards.handler import Handler

FUNCTION = Handler(["{function}"])
handler = FUNCTION.event


def reward(request):
    """functions-framework --target reward"""
    if request.method == "GET":
        status, body = 200, FUNCTION.ready()
    else:
        status, body = FUNCTION.respond(request.get_data())
    return body, status, {{"Content-Type": "application/json"}}
'''

KNATIVE = """apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: {name}
spec:
  template:
    metadata:
      annotations:
        autoscaling.knative.dev/min-scale: "0"
        autoscaling.knative.dev/max-scale: "100"
    spec:
      containerConcurrency: {concurrency}
      timeoutSeconds: {seconds}
      containers:
        - image: REGISTRY/{name}:latest
          ports:
            - containerPort: 8080
          resources:
            requests: {{cpu: "1", memory: 512Mi}}
            limits: {{cpu: "1", memory: 512Mi}}
"""

LAMBDA = """AWSTemplateFormatVersion: "2010-09-09"
Transform: AWS::Serverless-2016-10-31
Description: Reward function {function}
Resources:
  Reward:
    Type: AWS::Serverless::Function
    Properties:
      FunctionName: {name}
      Runtime: python3.12
      Handler: main.handler
      CodeUri: .
      MemorySize: 512
      Timeout: {seconds}
Outputs:
  Function:
    Description: For the recipe, where = "lambda:{name}"
    Value: !Ref Reward
"""

FUNCTION_COMPUTE = """edition: 3.0.0
name: {name}
access: default
resources:
  reward:
    component: fc3
    props:
      region: ${{env('FC_REGION', 'cn-hangzhou')}}
      functionName: {name}
      description: Reward function {function}
      runtime: custom-container
      cpu: 1
      memorySize: 1024
      diskSize: 512
      timeout: {seconds}
      instanceConcurrency: {concurrency}
      customContainerConfig:
        image: ${{env('FC_IMAGE')}}
        port: 9000
      triggers:
        - triggerName: http
          triggerType: http
          triggerConfig:
            authType: anonymous
            methods: [GET, POST]
"""

DEPLOY = {
    "cloud-run": """    gcloud run deploy {name} --source . --no-allow-unauthenticated --concurrency {concurrency} \\
        --timeout {seconds} --min-instances 0 --cpu-boost

The URL it prints goes into the recipe (`[reward] where = "https://..."`), the token of
`gcloud auth print-identity-token` into the variable that `[reward.call] token_env` names.""",
    "knative": """    docker build -t REGISTRY/{name}:latest . && docker push REGISTRY/{name}:latest
    kubectl apply -f service.yaml      # with your registry's name in it

`kubectl get ksvc {name}` prints the URL for the recipe.""",
    "lambda": """    sam build && sam deploy --guided

In the recipe: `[reward] where = "lambda:{name}"`; region and credentials come from the environment.""",
    "function-compute": """    docker build -t $FC_IMAGE . && docker push $FC_IMAGE
    s deploy                           # FC_IMAGE: a name in your container registry

The trigger's URL goes into the recipe. It is open to whoever knows it: set `authType: function` and a gateway that
signs, or keep it inside your network (`disableURLInternet: true`), where that matters.""",
}

README = """# Reward function {function}

{deploy}

Here, as the platform runs it: `PORT=8080 python -m rollart.rewards.server {function}`; a GET says that it is ready,
a POST scores (the contract: `rollart/rewards/contract.py`). Secrets of the function (a judge's key) are environment
variables of the deployment; none are in this folder.
"""


def write_package(function: str, target: str, folder: Path, *, concurrency: int = 1, seconds: int = 60) -> list[str]:
    """Write the folder; returns its files. Raises ConfigError."""
    if target not in TARGETS:
        raise ConfigError(f"--target must be one of {', '.join(TARGETS)}; got {target!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: name a new one with --out")
    if getattr(reward_function(function), "executes_output", False):
        raise ConfigError(f"reward {function} runs what the model wrote; this needs a sandbox, and a package has none")
    module = "" if function in REWARDS else function.partition(":")[0]
    name = re.sub(r"[^a-z0-9]+", "-", function.lower()).strip("-")[:60]
    values = {"function": function, "name": name, "concurrency": concurrency, "seconds": seconds,
              "port": 9000 if target == "function-compute" else 8080}
    folder.mkdir(parents=True, exist_ok=True)
    own = Path(rollart.__file__).parent
    for file in SERVING:
        _copy(own / file, folder / "rollart" / file)
    requirements = _copy_module(module, folder) if module else ""
    texts = {"requirements.txt": requirements, "main.py": ENTRY, "README.md": README}
    if target == "lambda":
        texts["template.yaml"] = LAMBDA
    else:
        texts["Dockerfile"] = DOCKERFILE
        texts[".dockerignore"] = "__pycache__\n"
    if target == "knative":
        texts["service.yaml"] = KNATIVE
    if target == "function-compute":
        texts["s.yaml"] = FUNCTION_COMPUTE
    values["deploy"] = DEPLOY[target].format(**values)
    for file, text in texts.items():
        (folder / file).write_text(text if file == "requirements.txt" else text.format(**values))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _copy_module(module: str, folder: Path) -> str:
    """The user's module, or the whole top-level package that it is in; returns their requirements.txt."""
    top = module.partition(".")[0]
    if top == "rollart" or top in sys.stdlib_module_names:
        if top == "rollart":
            return ""
        raise ConfigError(f"{module} is a module of Python itself, not of yours")
    if (folder / top).exists() or top in ("main", "requirements"):
        raise ConfigError(f"a module named {top} would hide the package's own: rename it")
    file = importlib.import_module(top).__file__
    if file is None:
        raise ConfigError(f"{top} has no source to package: give the package an __init__.py")
    source = Path(file)
    if source.name == "__init__.py":
        shutil.copytree(source.parent, folder / top, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.pyc"))
        beside = source.parent.parent
    else:
        _copy(source, folder / source.name)
        beside = source.parent
    needs = beside / "requirements.txt"
    return needs.read_text() if needs.exists() else ""


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
