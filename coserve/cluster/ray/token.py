"""The token that calls of Ray's processes need: without it, anybody who reaches their ports could
run code.

Ray reads its settings when it is imported, so this is done first, and imports nothing of Ray. They
are environment variables (https://docs.ray.io/en/latest/ray-security/token-auth.html), which Ray's
processes inherit.
"""

import os
import secrets
import stat
from pathlib import Path

from coserve.errors import ClusterError
from coserve.home import home_directory, make_private
from coserve.server.options.hosts import is_loopback

TOKEN_FILE = "ray_token"
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OF_OTHERS = 0o077


def token_file() -> Path:
    """Return the path of this user's token: in the home of `$COSERVE_HOME`, or ~/.coserve."""
    return home_directory() / TOKEN_FILE


def use_token(*, creates: bool) -> None:
    """Have Ray use a token in this process and in those that it starts: the one that Ray's
    variables name, or else the one in the home. Where Ray's variables turn tokens off, there is
    none.

    Args:
        creates: Whether to make a token if there is none, for a new cluster; otherwise Ray is used
            without, since the cluster may have none.

    Raises:
        ClusterError: Other users can read the token, or it cannot be read or written.
    """
    if os.environ.get(_MODE, "token").lower() != "token":
        return
    if not any(os.environ.get(name) for name in (_TOKEN, _PATH)):
        path = token_file()
        try:
            if creates:
                _create(path)
            if not path.exists():
                return
            _check_is_private(path)
        except OSError as error:
            raise ClusterError(
                f"the token of the cluster, {path}, cannot be used: {error.strerror or error}"
            ) from None
        os.environ[_PATH] = str(path)
    os.environ[_MODE] = "token"


def check_reach(host: str) -> None:
    """Raise ClusterError for a new cluster that other machines would reach, and that asks for no
    token.
    """
    if os.environ.get(_MODE) != "token" and not is_loopback(host):
        raise ClusterError(
            f"anybody who reaches Ray's ports could run code: a cluster at {host} needs its token, "
            f"which {_MODE}="
            f"{os.environ.get(_MODE, '')} turns off; leave that out, or --host"
        )


def token_in_use() -> Path | None:
    """Return the file of the token that Ray uses in this process; None if there is no such file."""
    return (
        Path(path) if os.environ.get(_MODE) == "token" and (path := os.environ.get(_PATH)) else None
    )


def refused(address: str) -> ClusterError:
    """Return the error for a cluster that takes no call without its token."""
    return ClusterError(
        f"the cluster at {address} needs a token, and this machine has another or none: copy "
        f"{TOKEN_FILE} from the "
        f"home of its first machine to {token_file()}, or have {_PATH} name a file with it"
    )


def _create(path: Path) -> None:
    """Write a new token, unless there is one."""
    make_private(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def _check_is_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & _OF_OTHERS:
        raise ClusterError(
            f"other users can read or change the token of the cluster: chmod 600 {path}"
        )
