"""Simon Willison's llm, as a command: `python llm_client.py URL MODEL`; a line for each thing that
works."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

URL, MODEL = sys.argv[1:]
home = Path(mkdtemp(prefix="llm-"))
# YAML's strings may be JSON's.
entry = {
    "model_id": "served",
    "model_name": MODEL,
    "api_base": URL,
    "supports_schema": True,
    "supports_tools": True,
}
(home / "extra-openai-models.yaml").write_text(json.dumps([entry]))
FUNCTIONS = """
def weather(city: str) -> str:
    "How the weather is."
    return "rain"

def clock(zone: str) -> str:
    "What time it is."
    return "noon"
"""


def llm(*arguments: str) -> str:
    """What the command prints."""
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    environment = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


options = ("-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "250")
assert llm(*options, "hello", "--no-stream").strip() == "Hello!"
print("chat")
assert llm(*options, "hello").strip() == "Hello!"
print("stream")
# "is_large bool" would leave room for more properties, of which so small a model finds no end.
schema = {
    "type": "object",
    "properties": {"is_large": {"type": "boolean"}},
    "required": ["is_large"],
}
closed = json.dumps(schema | {"additionalProperties": False})
assert json.loads(llm(*options, "hello", "--schema", closed))["is_large"] in (True, False)
print("structured output")
shown = llm(*options, "weather", "--functions", FUNCTIONS)
calls = json.loads(llm("logs", "-n", "1", "--json"))
assert shown.strip() and calls[0]["tool_results"][0]["output"] == "rain", calls
print("tools")
