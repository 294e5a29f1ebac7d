"""Values of `--lora-modules`, in vLLM's forms."""

import json


def lora_module(given: str) -> tuple[str, str]:
    """Return name and path of an adapter: NAME=PATH, or JSON with `name` and `path`.

    Raises:
        ValueError: It is neither.
    """
    if given.lstrip().startswith("{"):
        try:
            value = json.loads(given)
        except ValueError as error:
            raise ValueError(f"lora_modules has JSON that cannot be read: {error}") from None
        if value.keys() <= {"name", "path", "base_model_name"} and {"name", "path"} <= value.keys():
            name, path = value["name"], value["path"]
            if isinstance(name, str) and isinstance(path, str) and name and path:
                return name, path
        raise ValueError(
            'lora_modules must be NAME=PATH, or JSON such as {"name": "mine", "path": "DIR"}'
        )
    name, separator, path = given.partition("=")
    if not (name and separator and path):
        raise ValueError(
            f"lora_modules must be NAME=PATH, or JSON with name and path, not {given!r}"
        )
    return name, path
