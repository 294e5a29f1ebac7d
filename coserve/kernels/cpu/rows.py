"""Operations row by row, by the kernels of `rows.cpp` and `draw.cpp`: float32 or bfloat16, no gaps
within a row, however far apart rows lie. Each function gives the same as its plain twin, to
rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.base import SiluMulGradients
from coserve.kernels.cpu.compiled import Library

_DTYPES = frozenset({torch.float32, torch.bfloat16})


def fit(first: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels can work on these matrices (and vectors), all of one dtype."""
    dtype = first.dtype
    if dtype not in _DTYPES or not first.is_cpu or first.stride(-1) != 1:
        return False
    # A decode step calls this some hundred times, and a generator takes twice as long.
    for tensor in others:
        if tensor.dtype != dtype or not tensor.is_cpu or tensor.stride(-1) != 1:
            return False
    return True


def rms_norm(kernels: Library, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `Backend.rms_norm`."""
    n, width = x.shape
    assert width % weight.shape[0] == 0
    y = torch.empty(n, width, dtype=x.dtype)
    kernels.rms_norm(
        *(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            y.data_ptr(),
            n,
            width,
            weight.shape[0],
            eps,
        ),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


def rms_norm_gradient(
    kernels: Library, grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool
) -> tuple[Tensor, Tensor | None]:
    """Implement `Backend.rms_norm_gradient`."""
    n, width = x.shape
    assert grad.shape == x.shape and width % weight.shape[0] == 0
    x_grad = torch.empty(n, width, dtype=x.dtype)
    y = torch.empty_like(x_grad) if with_y else None
    kernels.rms_norm_gradient(
        *(grad.data_ptr(), grad.stride(0), x.data_ptr(), x.stride(0), weight.data_ptr()),
        *(x_grad.data_ptr(), None if y is None else y.data_ptr(), n, width, weight.shape[0], eps),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return x_grad, y


def dropped(kernels: Library, x: Tensor, row_ids: Tensor, *, p: float, salt: int) -> Tensor:
    """Implement `Backend.dropped`."""
    n, width = x.shape
    assert row_ids.shape == (n,) and row_ids.dtype == torch.int64 and row_ids.is_contiguous()
    y = torch.empty(n, width, dtype=x.dtype)
    kernels.drop_features(
        *(x.data_ptr(), x.stride(0), row_ids.data_ptr(), salt, p, y.data_ptr(), n, width),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


def silu_mul(kernels: Library, gate: Tensor, up: Tensor) -> Tensor:
    """Implement `Backend.silu_mul`."""
    n, width = gate.shape
    assert up.shape == gate.shape
    y = torch.empty(n, width, dtype=gate.dtype)
    kernels.silu_mul(
        *(gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), y.data_ptr(), n, width),
        *(gate.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


def silu_mul_gradients(
    kernels: Library, grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool
) -> SiluMulGradients:
    """Implement `Backend.silu_mul_gradients`."""
    n, width = gate.shape
    assert grad.shape == up.shape == gate.shape
    gate_grad, up_grad = (torch.empty(n, width, dtype=gate.dtype) for _ in range(2))
    y = torch.empty_like(gate_grad) if with_y else None
    kernels.silu_mul_gradient(
        *(
            grad.data_ptr(),
            grad.stride(0),
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
        ),
        *(gate_grad.data_ptr(), up_grad.data_ptr(), None if y is None else y.data_ptr(), n, width),
        *(gate.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return SiluMulGradients(gate_grad, up_grad, y)


def rope(kernels: Library, x: Tensor, cos: Tensor, sin: Tensor, *, reverse: bool) -> Tensor:
    """Implement `Backend.rope`, or `Backend.rope_gradient` in reverse."""
    n, width = x.shape
    assert cos.shape == sin.shape == (n, cos.shape[1]) and width % cos.shape[1] == 0
    y = torch.empty(n, width, dtype=x.dtype)
    kernels.rope(
        *(
            x.data_ptr(),
            x.stride(0),
            cos.data_ptr(),
            cos.stride(0),
            sin.data_ptr(),
            sin.stride(0),
            y.data_ptr(),
        ),
        *(n, width, cos.shape[1], reverse, x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


def fit_by_columns(kernels: Library, logits: Tensor) -> bool:
    """Return whether logits lie column after column, and there are kernels of the loss for that
    (`logit_columns.cpp`).
    """
    return (
        kernels.has_amx
        and logits.dtype == torch.bfloat16
        and logits.is_cpu
        and logits.T.is_contiguous()
    )


def fit_head_by_columns(kernels: Library, logits: Tensor, weight: Tensor) -> bool:
    """Return whether logits lie column after column, and a head's weight is one that the kernel
    cuts into whole tiles.
    """
    if logits.stride(1) == 1 or not fit_by_columns(kernels, logits) or weight.dtype != logits.dtype:
        return False
    return weight.is_contiguous() and weight.shape[1] % 32 == 0


def cross_entropy(
    kernels: Library, logits: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `Backend.cross_entropy`.

    Raises:
        IndexError: a target is not in the vocabulary.
    """
    targets = _checked(targets, logits)
    loss, log_sum = (torch.empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    correct = torch.empty(logits.shape[0], dtype=torch.bool)
    if logits.stride(1) != 1:
        kernels.cross_entropy_of_columns(
            *(
                logits.data_ptr(),
                targets.data_ptr(),
                loss.data_ptr(),
                correct.data_ptr(),
                log_sum.data_ptr(),
            ),
            *(*logits.shape, torch.get_num_threads()),
        )
        return loss, correct, log_sum
    kernels.cross_entropy(
        *(
            logits.data_ptr(),
            logits.stride(0),
            targets.data_ptr(),
            loss.data_ptr(),
            correct.data_ptr(),
        ),
        *(
            log_sum.data_ptr(),
            *logits.shape,
            logits.dtype == torch.bfloat16,
            torch.get_num_threads(),
        ),
    )
    return loss, correct, log_sum


def cross_entropy_gradient(
    kernels: Library,
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    loss_grad: Tensor,
    *,
    overwrites: bool,
) -> Tensor:
    """Implement `Backend.cross_entropy_gradient`.

    Raises:
        IndexError: a target is not in the vocabulary.
    """
    targets, log_sum, loss_grad = (
        _checked(targets, logits),
        log_sum.contiguous(),
        loss_grad.contiguous(),
    )
    grad = (
        logits
        if overwrites and logits.is_contiguous()
        else torch.empty_like(logits, memory_format=torch.contiguous_format)
    )
    if logits.stride(1) != 1:
        kernels.cross_entropy_gradient_of_columns(
            *(
                logits.data_ptr(),
                targets.data_ptr(),
                log_sum.data_ptr(),
                loss_grad.data_ptr(),
                grad.data_ptr(),
            ),
            *(*logits.shape, torch.get_num_threads()),
        )
        return grad
    kernels.cross_entropy_gradient(
        *(
            logits.data_ptr(),
            logits.stride(0),
            targets.data_ptr(),
            log_sum.data_ptr(),
            loss_grad.data_ptr(),
        ),
        *(grad.data_ptr(), *logits.shape, logits.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return grad


def cross_entropy_input_gradient(
    kernels: Library,
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    loss_grad: Tensor,
    weight: Tensor,
) -> Tensor:
    """Run the kernel of `linear_cross_entropy`.

    Raises:
        IndexError: a target is not in the vocabulary.
    """
    (n, vocabulary), width = logits.shape, weight.shape[1]
    assert weight.shape[0] == vocabulary
    grad = torch.empty(n, width, dtype=logits.dtype)
    targets, log_sum, loss_grad = (
        _checked(targets, logits),
        log_sum.contiguous(),
        loss_grad.contiguous(),
    )
    kernels.cross_entropy_input_gradient_of_columns(
        *(
            logits.data_ptr(),
            targets.data_ptr(),
            log_sum.data_ptr(),
            loss_grad.data_ptr(),
            weight.data_ptr(),
        ),
        *(grad.data_ptr(), n, vocabulary, width, torch.get_num_threads()),
    )
    return grad


def argmax(kernels: Library, logits: Tensor) -> Tensor:
    """Implement `Backend.argmax`; PyTorch's takes far longer than reading the logits."""
    n, vocabulary = logits.shape
    places = torch.empty(n, dtype=torch.int64)
    kernels.argmax(
        *(logits.data_ptr(), logits.stride(0), places.data_ptr(), n, vocabulary),
        *(logits.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return places


def draw(
    kernels: Library,
    scores: Tensor,
    uniform: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
) -> Tensor:
    """Implement `Backend.draw`: one pass for the weights, several over ever fewer for the kept
    places, and one for the place.
    """
    n, vocabulary = scores.shape
    places, numbers = (
        torch.empty(n, dtype=torch.int64),
        torch.tensor((uniform, top_p), dtype=torch.float64),
    )
    most = torch.tensor(top_k, dtype=torch.int64)
    kernels.draw(
        *(
            scores.data_ptr(),
            scores.stride(0),
            numbers[0].data_ptr(),
            most.data_ptr(),
            numbers[1].data_ptr(),
        ),
        *(places.data_ptr(), n, vocabulary, torch.get_num_threads()),
    )
    return places


def _checked(targets: Tensor, logits: Tensor) -> Tensor:
    """Return targets whose logits a kernel may touch, contiguous.

    Raises:
        IndexError: a target is not in the vocabulary.
    """
    assert targets.dtype == torch.int64 and targets.shape == logits.shape[:1]
    if targets.shape[0]:
        least, most = torch.aminmax(targets)
        if least < 0 or most >= logits.shape[1]:
            raise IndexError(f"targets must be from 0 to {logits.shape[1] - 1}")
    return targets.contiguous()
