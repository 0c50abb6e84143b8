"""One optimizer class per rule, with explicit arguments for `help`, type checkers and editors.

Defaults come from `options.DEFAULTS`; float64 weights use the rule's own defaults.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import torch

from .optimizer import SpectralOptimizer
from .rules.base import Rate
from .rules.muon import MsignDtype
from .sphere import Scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
Nonfinite = Literal["raise", "skip"]


def signed(signature: Callable[P, None]) -> Callable[P, None]:
    """Create an `__init__` with the given `signature` that calls `SpectralOptimizer.__init__`.

    Only explicitly passed arguments are forwarded, so that an omitted argument can be distinguished
    from an explicit default.
    """

    @wraps(signature)
    def init(*args: P.args, **kwargs: P.kwargs) -> None:
        SpectralOptimizer.__init__(*args, **kwargs)  # type: ignore[arg-type]

    return init


class AdamW(SpectralOptimizer):
    """AdamW: `W -= lr m / (sqrt(v) + epsilon)` with bias-corrected means m of G and v of G^2.

    Source: "Decoupled Weight Decay Regularization" (arXiv 1711.05101). Steps are identical to the
    steps of `torch.optim.AdamW` with the same betas. Use AdamW as a baseline, and for embeddings,
    heads, gains and biases. `split_parameters` always assigns these parameters to AdamW.

        optimizer = AdamW(model.parameters(), lr=1e-3)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        beta1 (default 0.9): Decay rate of the gradient's moving average, in [0, 1).
        beta2 (default 0.95): Decay rate of the squared gradient's moving average, in [0, 1).
        epsilon (default 1e-08): Positive number added to the square root of the second moment.
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "adamw"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.001,
        weight_decay: Rate = 0.1,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        epsilon: float = 1e-08,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class Muon(SpectralOptimizer):
    """Muon: `W -= lr s msign(M)` with momentum M and a shape-dependent scale s.

    Source: "Muon: an optimizer for hidden layers" (Jordan et al., 2024). Steps are identical to the
    steps of `torch.optim.Muon` with the same polynomials. Try this spectral optimizer first.

        optimizer = Muon(split_parameters(model), lr=2e-2)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 5): Number of msign steps, at least 1.
        msign_dtype (default 'bfloat16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        momentum (default 0.95): Decay rate of the gradient's moving average, in [0, 1).
        nesterov (default True): Step along `(1 - momentum) G + momentum M` instead of the moving
            average M.
        scale (default 'spectral_mup'): Formula for the shape-dependent update scale
            (docs/spectral.md).
        scale_factor (default 1.0): Positive multiplier for the update.
        cautious_decay (default False): Do not decay entries that the update increases in magnitude
            ("Cautious Weight Decay", Chen et al., 2025).
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "muon"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.02,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 5,
        msign_dtype: MsignDtype | None = "bfloat16",
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "spectral_mup",
        scale_factor: float = 1.0,
        cautious_decay: bool = False,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class NorMuon(SpectralOptimizer):
    """NorMuon: Muon with each row of the update divided by the row's running RMS.

    Source: "NorMuon: Making Muon more efficient and scalable" (Li et al., 2025). Use NorMuon for
    layers whose neurons learn at very different rates under Muon.

        optimizer = NorMuon(split_parameters(model), lr=2e-2)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 5): Number of msign steps, at least 1.
        msign_dtype (default 'bfloat16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        momentum (default 0.95): Decay rate of the gradient's moving average, in [0, 1).
        nesterov (default True): Step along `(1 - momentum) G + momentum M` instead of the moving
            average M.
        scale (default 'spectral_mup'): Formula for the shape-dependent update scale
            (docs/spectral.md).
        scale_factor (default 1.0): Positive multiplier for the update.
        cautious_decay (default False): Do not decay entries that the update increases in magnitude
            ("Cautious Weight Decay", Chen et al., 2025).
        beta2 (default 0.95): Decay rate of the moving average of each update row's mean square, in
            [0, 1).
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "normuon"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.02,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 5,
        msign_dtype: MsignDtype | None = "bfloat16",
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "spectral_mup",
        scale_factor: float = 1.0,
        cautious_decay: bool = False,
        beta2: float = 0.95,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class AdaMuon(SpectralOptimizer):
    """AdaMuon: `W -= lr s k O / (sqrt(V) + epsilon)` with O = msign(sign(M)) and its mean square V.

    Source: "AdaMuon: Adaptive Muon Optimizer" (Si, Zhang and Shen, 2025); k sets the update's RMS
    to 0.2 lr. Use AdaMuon with learning rates tuned for AdamW, or for weights whose entries learn
    at very different rates. Besides the momentum, the state includes V, which is as large as the
    weight.

        optimizer = AdaMuon(split_parameters(model), lr=1e-3)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 5): Number of msign steps, at least 1.
        msign_dtype (default 'bfloat16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        momentum (default 0.95): Decay rate of the gradient's moving average, in [0, 1).
        nesterov (default True): Step along `(1 - momentum) G + momentum M` instead of the moving
            average M.
        scale (default 'align_adam_rms'): Formula for the shape-dependent update scale
            (docs/spectral.md); the default is the paper's formula.
        scale_factor (default 1.0): Positive multiplier for the update.
        cautious_decay (default False): Do not decay entries that the update increases in magnitude
            ("Cautious Weight Decay", Chen et al., 2025).
        beta2 (default 0.95): Decay rate of the moving average of the update's squared entries, in
            [0, 1); the paper sets it to `momentum`.
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "adamuon"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.001,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 5,
        msign_dtype: MsignDtype | None = "bfloat16",
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "align_adam_rms",
        scale_factor: float = 1.0,
        cautious_decay: bool = False,
        beta2: float = 0.95,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class MuonSphere(SpectralOptimizer):
    """MuonSphere: Muon on weights that are rescaled to spectral norm R before every step.

    Source: "Controlled LLM Training on Spectral Sphere" (arXiv 2601.08393). Use MuonSphere if
    weights must not grow: weight decay needs no tuning, and learning rates transfer across widths.

        optimizer = MuonSphere(split_parameters(model), lr=5e-3)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 8): Number of msign steps, at least 1.
        msign_dtype (default 'float16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        momentum (default 0.95): Decay rate of the gradient's moving average, in [0, 1).
        nesterov (default True): Step along `(1 - momentum) G + momentum M` instead of the moving
            average M.
        scale (default 'spectral_mup'): Formula for the shape-dependent update scale
            (docs/spectral.md).
        scale_factor (default 1.0): Positive multiplier for the update.
        radius (default 'spectral_mup'): Formula for the shape-dependent radius R
            (docs/spectral.md).
        radius_scaler (default 1.0): Positive multiplier for the radius (the paper's c).
        krylov_steps (default 4): Number of block Krylov steps per update, warm-started from the
            previous singular vectors; at least 1.
        retraction (default 'hard'): hard: rescale to R exactly. dynamic: multiply by `1 +-
            retraction_rate lr` towards R.
        retraction_rate (default 0.1): Rate of the dynamic retraction (the paper's lambda_wd); must
            not be negative.
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "muon_sphere"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.005,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 8,
        msign_dtype: MsignDtype | None = "float16",
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "spectral_mup",
        scale_factor: float = 1.0,
        radius: Scale = "spectral_mup",
        radius_scaler: float = 1.0,
        krylov_steps: int = 4,
        retraction: Literal["hard", "dynamic"] = "hard",
        retraction_rate: float = 0.1,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class SpectralSphere(SpectralOptimizer):
    """SSO: `W -= lr s msign(M + lambda u v^T)`, tangent to the sphere `||W||_2 = R`.

    Source: "Controlled LLM Training on Spectral Sphere" (arXiv 2601.08393), algorithm 1; lambda
    solves `<u v^T, msign(M + lambda u v^T)> = 0` for the weight's top singular pair (u, v). Use SSO
    in the same cases as MuonSphere. Only SSO's steps are tangent to the sphere.

        optimizer = SpectralSphere(split_parameters(model), lr=5e-3)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 8): Number of msign steps, at least 1.
        msign_dtype (default 'float16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        momentum (default 0.95): Decay rate of the gradient's moving average, in [0, 1).
        nesterov (default True): Step along `(1 - momentum) G + momentum M` instead of the moving
            average M.
        scale (default 'spectral_mup'): Formula for the shape-dependent update scale
            (docs/spectral.md).
        scale_factor (default 1.0): Positive multiplier for the update.
        radius (default 'spectral_mup'): Formula for the shape-dependent radius R
            (docs/spectral.md).
        radius_scaler (default 1.0): Positive multiplier for the radius (the paper's c).
        krylov_steps (default 4): Number of block Krylov steps per update, warm-started from the
            previous singular vectors; at least 1.
        retraction (default 'hard'): hard: rescale to R exactly. dynamic: multiply by `1 +-
            retraction_rate lr` towards R.
        retraction_rate (default 0.1): Rate of the dynamic retraction (the paper's lambda_wd); must
            not be negative.
        tolerance (default None): Largest |<u v^T, direction>| that counts as tangent; None means
            1e-3 with msign_dtype float16, 5e-3 with bfloat16 (msign's rounding errors), and 2e-4
            otherwise. In 16 bits, a component along u v^T of up to 0.05 (float16) or 0.1 (bfloat16)
            is attributed to rounding and subtracted from the direction; a larger component is kept.
        max_evaluations (default None): Maximum number of msign evaluations per unit and step;
            without early exit, the exact number. None means 8 with early exit; without early exit,
            2 for float32 matrices with more than 256 rows on GPUs with slow float64 (consumer
            cards, B300), and 1 otherwise.
        early_exit (default None): Stop once all units have converged, which requires a host sync;
            None means true on CPU, else false.
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "spectral_sphere"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.005,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 8,
        msign_dtype: MsignDtype | None = "float16",
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "spectral_mup",
        scale_factor: float = 1.0,
        radius: Scale = "spectral_mup",
        radius_scaler: float = 1.0,
        krylov_steps: int = 4,
        retraction: Literal["hard", "dynamic"] = "hard",
        retraction_rate: float = 0.1,
        tolerance: float | None = None,
        max_evaluations: int | None = None,
        early_exit: bool | None = None,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class MuonPlusPlus(SpectralOptimizer):
    """Muon++: Muon whose step does not change the weight's top singular value.

    Source: "Towards a Principled Muon under muP" (arXiv 2601.01306), algorithms 1 and 2. Use Muon++
    for experiments with constant weight norms.

        optimizer = MuonPlusPlus(split_parameters(model), lr=5e-3)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 8): Number of msign steps, at least 1.
        msign_dtype (default 'float16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        momentum (default 0.95): Decay rate of the gradient's moving average, in [0, 1).
        nesterov (default False): Orthogonalise `(1 - momentum) G + momentum M` instead of the
            moving average M used in the paper.
        scale (default 'spectral_mup'): Formula for the shape-dependent update scale
            (docs/spectral.md).
        scale_factor (default 1.0): Positive multiplier for the update.
        radius (default 'spectral_mup'): Formula for the shape-dependent radius R
            (docs/spectral.md).
        radius_scaler (default 1.0): Positive multiplier for the radius (the paper's c).
        krylov_steps (default 10): Number of block Krylov steps per singular triplet and update; at
            least 1.
        algorithm (default 'project_rescale'): project: algorithm 1, which preserves the norm only
            while steps are shorter than sigma_1 - sigma_2. project_rescale: algorithm 2, which also
            rescales the weight to the radius. dual: a first-order relaxation that only requires u^T
            D v = 0.
        tolerance (default None): Largest |u^T D v| that counts as tangent, for algorithm dual only;
            None means 1e-3 with msign_dtype float16, 5e-3 with bfloat16, and 2e-4 otherwise.
        max_evaluations (default None): Number of msign evaluations per unit and step, for algorithm
            dual only; None means 2 for float32 matrices with more than 256 rows on GPUs with slow
            float64 (consumer cards, B300), and 1 otherwise.
        correlation_rescale (default False): Multiply the weight by sqrt(last step's rho / rho) the
            first time that the correlation rho of the entries (eq. 4.13) exceeds its threshold. Not
            supported with project_rescale.
        correlation_threshold (default 1.0): Positive factor C in the paper's threshold, C
            (rows^-1/2 + cols^-1/2).
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "muon_plus_plus"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.005,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 8,
        msign_dtype: MsignDtype | None = "float16",
        momentum: float = 0.95,
        nesterov: bool = False,
        scale: Scale = "spectral_mup",
        scale_factor: float = 1.0,
        radius: Scale = "spectral_mup",
        radius_scaler: float = 1.0,
        krylov_steps: int = 10,
        algorithm: Literal["project", "project_rescale", "dual"] = "project_rescale",
        tolerance: float | None = None,
        max_evaluations: int | None = None,
        correlation_rescale: bool = False,
        correlation_threshold: float = 1.0,
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...


class SpectralDescent(SpectralOptimizer):
    """Spectral descent: `W -= lr ||G||_* msign(G)`, the steepest-descent step without momentum.

    Source: "When do spectral gradient updates help in deep learning?" (arXiv 2512.04299). Use
    SpectralDescent for theoretical work and small models.

        optimizer = SpectralDescent(split_parameters(model), lr=1e-3)

    Args:
        params: parameters, the result of `split_parameters`, or groups; see `SpectralOptimizer`.
        lr: learning rate, a number or a 0-d tensor; None means the default.
        weight_decay: decoupled weight decay, multiplied by lr.
        schedule (default 'polar_express'): Polynomial schedule of msign: a key of
            `spectrain.polar.SCHEDULES`.
        steps (default 8): Number of msign steps, at least 1.
        msign_dtype (default 'float16'): Dtype of the matmuls in msign; None means the weight's
            dtype.
        nonfinite: "raise" a FloatingPointError on a NaN or infinite gradient, or "skip" the step.
        master_weights: whether to keep float32 master weights for 16-bit parameters.
        replicas: process group of the ranks that replicate plain parameters; None means the group
            of the DDP model passed to `split_parameters`.
        exchange_dtype: dtype in which momenta and updates of sharded matrices are sent; None means
            no conversion.
    """

    default_rule = "spectral_descent"

    @signed
    def __init__(
        self,
        params: Any,
        lr: Rate | None = 0.001,
        weight_decay: Rate = 0.1,
        *,
        schedule: str = "polar_express",
        steps: int = 8,
        msign_dtype: MsignDtype | None = "float16",
        nonfinite: Nonfinite = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None: ...
