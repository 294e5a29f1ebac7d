"""Which clients are tried, and their environments: one each, made once and kept below
`environments()`."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, kw_only=True)
class Client:
    """name: in the table. packages: what its environment has, the client itself first. alone: what
    is installed then, without what it would like to have beside it. script: below scripts/, which
    runs there. registry: pip, npm, or "" for what is made by hand. is_heavy: tried by `make
    test-clients ALL=1` alone.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    alone: tuple[str, ...] = ()
    registry: str = "pip"
    is_heavy: bool = False

    @property
    def slug(self) -> str:
        """Of a path."""
        return Path(self.script).stem

    @property
    def directory(self) -> Path:
        """Where its environment is: another one for other packages."""
        digest = sha256("\n".join((*self.packages, *self.alone)).encode()).hexdigest()[:8]
        return environments() / f"{self.slug}-{digest}"

    def command(self) -> list[str]:
        """Runs its script, if the environment is there."""
        if not self.registry:
            return [os.environ[VLLM_PYTHON], "-X", "utf8", str(SCRIPTS / self.script)]
        if self.registry == "npm":
            # Modules are looked for beside the script, and above.
            return ["node", str(self.directory / self.script)]
        return [str(self.directory / "bin" / "python"), "-X", "utf8", str(SCRIPTS / self.script)]

    def version(self) -> str:
        """Of the client itself, in its environment."""
        if not self.packages:  # its builds have names of their own
            code = "import vllm; print(vllm.__version__)"
            said = subprocess.run(
                [self.command()[0], "-c", code], capture_output=True, text=True, check=True
            )
            return said.stdout.split()[-1]
        package = self.packages[0]
        if self.registry == "npm":
            name = package.rpartition("@")[0] or package
            found = json.loads(
                (self.directory / "node_modules" / name / "package.json").read_text()
            )
            return str(found["version"])
        code = f"import importlib.metadata as m; print(m.version({package.partition('==')[0]!r}))"
        return subprocess.run(
            [self.command()[0], "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()


CLIENTS = (
    Client(name="OpenAI for Python", packages=("openai==3.54.0",), script="openai_python.py"),
    Client(
        name="OpenAI for Node",
        packages=("openai@6.49.0",),
        script="openai_node.mjs",
        registry="npm",
    ),
    Client(name="LiteLLM", packages=("litellm==1.106.2", "mcp"), script="litellm_client.py"),
    Client(
        name="LangChain",
        packages=("langchain==1.4.7", "langchain-openai==1.7.3"),
        script="langchain_client.py",
    ),
    Client(
        name="LlamaIndex",
        packages=("llama-index-llms-openai-like==0.8.1",),
        script="llamaindex_client.py",
    ),
    Client(name="instructor", packages=("instructor==1.17.0",), script="instructor_client.py"),
    Client(
        name="guidance", packages=("guidance==0.3.1", "openai==3.54.0"), script="guidance_client.py"
    ),
    Client(name="llm", packages=("llm==0.36",), script="llm_client.py"),
    Client(name="aiperf", packages=("aiperf==0.13.0",), script="aiperf_client.py", is_heavy=True),
    Client(
        name="guidellm", packages=("guidellm==0.8.1",), script="guidellm_client.py", is_heavy=True
    ),
    Client(
        name="vLLM's load client", packages=(), script="vllm_client.py", registry="", is_heavy=True
    ),
)
# What writes checkpoints for tests/clients/test_quantisers.py. The tools would take other versions
# of torch each.
QUANTISERS = Client(
    name="quantisers",
    packages=(
        *(
            "torch==2.13.0",
            "transformers==5.17.0",
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "loguru",
            "pydantic",
        ),
        *(
            "psutil",
            "requests",
            "tqdm",
            "nvidia-ml-py",
            "pillow",
            "pyyaml",
            "py-cpuinfo",
            "setuptools",
            "wheel",
        ),
    ),
    alone=(
        *(
            "bitsandbytes==0.50.2",
            "compressed-tensors==0.19.0",
            "llmcompressor==0.14.0.1",
            "torchao==0.18.0",
        ),
        *(
            "auto-round==0.15.1",
            "autoawq==0.2.9",
            "gptqmodel==7.7.0",
            "device-smi",
            "tokenicer",
            "logbar",
            "pypcre",
        ),
        *("defuser", "threadpoolctl", "--no-build-isolation"),  # two of these have no wheels
    ),
    script="quantisers.py",
    is_heavy=True,
)
# For the environments that one run makes of those that are not heavy: a slow registry must not hold
# up all tests.
_INSTALLING_S = 300.0
_until_s = time.monotonic() + _INSTALLING_S
# Names the Python of an environment with vLLM, which is made by hand for each kind of machine.
VLLM_PYTHON = "COSERVE_VLLM"


def environments() -> Path:
    """Below the home, so that every checkout finds them again; or where COSERVE_CLIENTS says."""
    return Path(os.environ.get("COSERVE_CLIENTS") or Path.home() / ".cache" / "coserve-clients")


def make(client: Client) -> str:
    """Make its environment unless it is there; why that cannot be, or "".

    What breaks off halfway is made anew the next time.
    """
    if not client.registry:
        return "" if os.environ.get(VLLM_PYTHON) else f"{VLLM_PYTHON} names no Python that has vLLM"
    ready = client.directory / ".ready"
    if ready.exists():
        return ""
    if client.registry == "npm" and shutil.which("npm") is None:
        return "there is no npm"
    shutil.rmtree(client.directory, ignore_errors=True)
    client.directory.mkdir(parents=True)
    commands = _npm(client) if client.registry == "npm" else _pip(client)
    for command in commands:
        if (left_s := _until_s - time.monotonic()) < 0 and not client.is_heavy:
            return f"environments have taken {_INSTALLING_S:g} s: the next run makes more of them"
        try:
            limit_s = None if client.is_heavy else left_s
            done = subprocess.run(
                command, cwd=client.directory, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return f"environments have taken {_INSTALLING_S:g} s: the next run makes more of them"
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["?"])[-1]
            return f"{' '.join(client.packages)} could not be installed: {last}"
    ready.touch()
    return ""


def _pip(client: Client) -> list[list[str]]:
    python = str(client.directory / "bin" / "python")
    # Not compiled: most of it is never imported.
    options = ("--quiet", "--disable-pip-version-check", "--no-compile")
    install = [python, "-m", "pip", "install", *options, *client.packages]
    commands = [[sys.executable, "-m", "venv", str(client.directory)], install]
    if client.alone:
        commands.append([python, "-m", "pip", "install", *options, "--no-deps", *client.alone])
    return commands


def _npm(client: Client) -> list[list[str]]:
    shutil.copy(SCRIPTS / client.script, client.directory)
    return [["npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages]]
