"""References of Adam, AdamW, SGD, Lion, AdEMAMix and LAMB in f64, beside the implementations that pip installs.

    pip install -r tests/oracles/requirements.txt
    python tests/oracles/optimizers.py            # peers and wrong variants; exit code 1 if something disagrees
    python tests/oracles/optimizers.py --write    # tests/golden/optimizers.tsv, needs numpy only

The references follow the papers; a tensor is an array of numpy, scalars are Python floats. Peers that are not installed
are named and left out.
"""

import argparse
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent.parent / "golden" / "optimizers.tsv"

# ---- references -----------------------------------------------------------------------------------------------------


def norm(x):
    """The Euclidean norm, the sum of squares in f64 and correctly rounded whatever the dtype."""
    return math.sqrt(math.fsum(float(y) * float(y) for y in x))


def moments(h, t, g, m, v):
    """Kingma & Ba, arXiv:1412.6980, algorithm 1: both moments, the first one corrected, the denominator."""
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * (g * g)
    return m, v, m / (1 - h["beta1"] ** t), np.sqrt(v / (1 - h["beta2"] ** t)) + h["eps"]


def adam(h, t, p, g, s):
    """Adam with L2: the decay is part of the gradient, so that both moments see it."""
    m, v, m_hat, den = moments(h, t, g + h["weight_decay"] * p, *s)
    return p - h["lr"] * (m_hat / den), (m, v)


def adamw(h, t, p, g, s):
    """Loshchilov & Hutter, arXiv:1711.05101, algorithm 2, the decay scaled by lr."""
    m, v, m_hat, den = moments(h, t, g, *s)
    return p - h["lr"] * (m_hat / den + h["weight_decay"] * p), (m, v)


def sgd(h, t, p, g, s):
    """torch.optim.SGD as documented: the first buffer is the gradient itself, undamped."""
    (b,) = s
    coupled = h["decay"] == "coupled"
    if coupled:
        g = g + h["weight_decay"] * p
    d = g
    if h["momentum"]:
        b = g if t == 1 else h["momentum"] * b + (1 - h["dampening"]) * g
        d = g + h["momentum"] * b if h["nesterov"] else b
    return p - h["lr"] * (d if coupled else d + h["weight_decay"] * p), (b,)


def lion(h, t, p, g, s):
    """Chen et al., arXiv:2302.06675, algorithm 2."""
    (m,) = s
    c = h["beta1"] * m + (1 - h["beta1"]) * g
    return p - h["lr"] * (np.sign(c) + h["weight_decay"] * p), (h["beta2"] * m + (1 - h["beta2"]) * g,)


def alpha_at(h, t):
    return min(t * h["alpha"] / h["t_alpha"], h["alpha"]) if h["t_alpha"] else h["alpha"]


def beta3_at(h, t):
    if not h["t_beta3"]:
        return h["beta3"]
    start, end, x = math.log(h["beta1"]), math.log(h["beta3"]), t / h["t_beta3"]
    return min(math.exp(start * end / ((1 - x) * end + x * start)), h["beta3"])


def ademamix(h, t, p, g, s):
    """Pagliardini et al., arXiv:2409.03137, algorithm 1: the slow average is not corrected. States: fast, v, slow."""
    m, v, slow = s
    m, v, m_hat, den = moments(h, t, g, m, v)
    beta3 = beta3_at(h, t)
    slow = beta3 * slow + (1 - beta3) * g
    return p - h["lr"] * ((m_hat + alpha_at(h, t) * slow) / den + h["weight_decay"] * p), (m, v, slow)


def lamb_factor(h, p, r):
    p_norm, r_norm = norm(p), norm(r)
    if not (p_norm > 0 and r_norm > 0):
        return 1.0
    return min(1.0, h["max_unorm"] * p_norm / r_norm) if h["max_unorm"] else min(p_norm / r_norm, h["max_trust"])


def lamb(h, t, p, g, s):
    """You et al., arXiv:1904.00962, algorithm 2, with the identity for phi and a bound on the ratio.

    decay=inside: the decay is a part of the update and of its norm, as in the paper. decay=decoupled: as in AdamW.
    """
    m, v, m_hat, den = moments(h, t, g, *s)
    r = m_hat / den
    outside = h["weight_decay"] * p
    if h["decay"] == "inside":
        r, outside = r + outside, 0 * p
    return p - h["lr"] * (lamb_factor(h, p, r) * r + outside), (m, v)


OPTIMIZERS = {f.__name__: f for f in (adam, adamw, sgd, lion, ademamix, lamb)}
STATES = {"adam": 2, "adamw": 2, "sgd": 1, "lion": 1, "ademamix": 3, "lamb": 2}


def run(optimizer, h, steps, gradient, p0, dtype=np.float64, step=None):
    """All steps from zero states. maximize turns the gradient's sign; skip_zeros keeps what has a gradient of zero."""
    step = step or OPTIMIZERS[optimizer]
    p = np.array(p0, dtype)
    s = tuple(np.zeros_like(p) for _ in range(STATES[optimizer]))
    for t in range(1, steps + 1):
        g = np.array([gradient(t, i) for i in range(len(p))], dtype)
        old_p, old_s = p, s
        p, s = step(h, t, p, -g if h["maximize"] else g, s)
        if h["skip_zeros"]:
            p = np.where(g == 0, old_p, p)
            s = tuple(np.where(g == 0, old, new) for old, new in zip(old_s, s, strict=True))
    return p, s


# ---- gradients ------------------------------------------------------------------------------------------------------

EXPONENTS = (0, 0, 0, 0, 0, 0, 0, None, 5, -8, -18, -30)


def hashed(t, i):
    """One of 16 / 16 2^-k, k = 0..7, times 2^EXPONENTS[i]; an eighth are 0; a quarter have not the sign (-1)^i."""
    x = 64 * t + i
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    x ^= x >> 16
    if EXPONENTS[i] is None or x >> 29 == 0:
        return 0.0
    sign = (-1) ** i * (-1 if x >> 8 & 3 == 0 else 1)
    return sign * ((x & 15) + 1) * 2.0 ** (EXPONENTS[i] - 4 - (x >> 4 & 7))


GRADIENTS = {"hash": hashed, "one": lambda t, i: 1.0, "zero": lambda t, i: 0.0}

# ---- cases ----------------------------------------------------------------------------------------------------------

P = (1.0, -1.0, 0.5, -0.5, 2.0, 0.0, -3.0, 1.25, -8.0, 0.0625, 1.0, -1.0)
COMMON = {"maximize": 0, "skip_zeros": 0}
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS = {
    "adam": ADAM,
    "adamw": {**ADAM, "weight_decay": 0.01},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "nesterov": 0, "weight_decay": 0.0, "decay": "coupled"},
    "lion": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    "ademamix": {**ADAM, "beta3": 0.9999, "alpha": 5.0, "t_alpha": 0, "t_beta3": 0, "weight_decay": 0.01},
    "lamb": {**ADAM, "eps": 1e-6, "weight_decay": 0.01, "decay": "inside", "max_trust": 10.0, "max_unorm": 0.0},
}
TENTH = {"lr": 0.1, "weight_decay": 0.1}


class Case:
    def __init__(self, name, optimizer, steps, changes=None, gradient="hash", p0=P):
        self.name, self.optimizer, self.steps, self.gradient, self.p0 = name, optimizer, steps, gradient, p0
        self.h = {**DEFAULTS[optimizer], **COMMON, **(changes or {})}
        assert len(self.h) == len(DEFAULTS[optimizer]) + 2, changes
        assert all(float(np.float32(x)) == x for x in p0)

    def with_changes(self, changes):
        return Case(self.name, self.optimizer, self.steps, {**self.h, **changes}, self.gradient, self.p0)

    def run(self, **arguments):
        return run(self.optimizer, self.h, self.steps, GRADIENTS[self.gradient], self.p0, **arguments)


def cases():
    for o in DEFAULTS:
        yield Case("default_10", o, 10)
        yield Case("one_from_zero", o, 1, TENTH, "one", (1.0,))
        for steps in 1, 2, 100:
            yield Case(f"tenth_{steps}", o, steps, TENTH)
        yield Case("maximize_100", o, 100, {**TENTH, "maximize": 1})
        yield Case("no_gradient_3", o, 3, TENTH, "zero")
        if o != "lamb":
            yield Case("skip_zeros_1", o, 1, {**TENTH, "skip_zeros": 1})
            yield Case("skip_zeros_100", o, 100, {**TENTH, "skip_zeros": 1})
    for o in "adam", "adamw":
        yield Case("betas_100", o, 100, {**TENTH, "beta1": 0.8, "beta2": 0.95})
        yield Case("eps_100", o, 100, {**TENTH, "eps": 1e-3})
    for decay in "coupled", "decoupled":
        h = {**TENTH, "decay": decay}
        if decay == "decoupled":
            yield Case("decoupled_one_from_zero", "sgd", 1, h, "one", (1.0,))
            for steps in 1, 2, 100:
                yield Case(f"decoupled_{steps}", "sgd", steps, h)
            yield Case("decoupled_skip_zeros_100", "sgd", 100, {**h, "skip_zeros": 1})
        yield Case(f"{decay}_plain_100", "sgd", 100, {**h, "momentum": 0.0})
        yield Case(f"{decay}_nesterov_one_from_zero", "sgd", 1, {**h, "nesterov": 1}, "one", (1.0,))
        yield Case(f"{decay}_nesterov_100", "sgd", 100, {**h, "nesterov": 1})
        yield Case(f"{decay}_nesterov_maximize_100", "sgd", 100, {**h, "nesterov": 1, "maximize": 1})
        for steps in 1, 2, 100:
            yield Case(f"{decay}_dampening_{steps}", "sgd", steps, {**h, "dampening": 0.5})
        yield Case(f"{decay}_dampening_skip_zeros_100", "sgd", 100, {**h, "dampening": 0.5, "skip_zeros": 1})
    yield Case("betas_100", "lion", 100, {**TENTH, "beta1": 0.95, "beta2": 0.98})
    scheduled = {**TENTH, "t_alpha": 50, "t_beta3": 50}
    yield Case("scheduled_one_from_zero", "ademamix", 1, scheduled, "one", (1.0,))
    for steps in 1, 2, 49, 50, 51, 100:
        yield Case(f"scheduled_{steps}", "ademamix", steps, scheduled)
    yield Case("scheduled_apart_100", "ademamix", 100, {**scheduled, "t_alpha": 20})
    yield Case("scheduled_alpha_100", "ademamix", 100, {**scheduled, "t_beta3": 0})
    yield Case("scheduled_beta3_100", "ademamix", 100, {**scheduled, "t_alpha": 0})
    yield Case("scheduled_beta3_of_0.99_100", "ademamix", 100, {**scheduled, "beta3": 0.99, "alpha": 8.0})
    yield Case("scheduled_skip_zeros_100", "ademamix", 100, {**scheduled, "skip_zeros": 1})
    large, small = tuple(16 * x for x in P), tuple(x / 256 for x in P)
    weak = {"lr": 0.1, "weight_decay": 0.01}
    yield Case("no_decay_100", "lamb", 100, {"lr": 0.1, "weight_decay": 0.0})
    yield Case("bounded_one_from_zero", "lamb", 1, {**TENTH, "max_trust": 0.5}, "one", (1.0,))
    for steps in 1, 100:
        yield Case(f"bounded_{steps}", "lamb", steps, weak, p0=large)
        yield Case(f"bounded_by_1_{steps}", "lamb", steps, {**TENTH, "max_trust": 1.0})
    yield Case("small_100", "lamb", 100, weak, p0=small)
    for decay in 0.0, 0.1:
        name = "unbounded" if decay else "unbounded_no_decay"
        for steps in 1, 2, 100:
            h = {"lr": 0.01, "weight_decay": decay, "max_trust": 1e9}
            yield Case(f"{name}_{steps}", "lamb", steps, h, p0=tuple(x / 4 for x in P))
    yield Case("zero_parameter_1", "lamb", 1, TENTH, p0=(0.0,) * 12)
    yield Case("zero_parameter_3", "lamb", 3, TENTH, p0=(0.0,) * 12)
    yield Case("zero_update_3", "lamb", 3, {"weight_decay": 0.0}, "zero")
    for decay in "inside", "decoupled":
        h = {**TENTH, "decay": decay}
        yield Case(f"max_unorm_{decay}_one_from_zero", "lamb", 1, {**h, "max_unorm": 0.5}, "one", (1.0,))
        yield Case(f"max_unorm_{decay}_zero_parameter_3", "lamb", 3, {**h, "max_unorm": 0.1}, p0=(0.0,) * 12)
        for c in 0.1, 100.0:
            for steps in 1, 100:
                yield Case(f"max_unorm_{decay}_{c:g}_{steps}", "lamb", steps, {**h, "max_unorm": c})


def closed_forms():
    """One step from zero states at p = g = 1, lr = wd = .1, eps left out: its result, and that of frequent errors."""
    beta3 = math.exp(math.log(0.9) * math.log(0.9999) / (0.98 * math.log(0.9999) + 0.02 * math.log(0.9)))
    return {
        ("adam", "one_from_zero"): (1 - 0.1, "p - lr; decoupled .89"),
        ("adamw", "one_from_zero"): (0.99 - 0.1, "p (1 - lr wd) - lr; decay after the update .891, coupled .9"),
        ("sgd", "one_from_zero"): (1 - 0.1 * 1.1, "p - lr (g + wd p)"),
        ("sgd", "decoupled_one_from_zero"): (0.99 - 0.1, "p (1 - lr wd) - lr g; decay after the update .891"),
        ("sgd", "coupled_nesterov_one_from_zero"): (1 - 0.1 * 1.9 * 1.1, "p - lr (1 + momentum) (g + wd p)"),
        ("sgd", "decoupled_nesterov_one_from_zero"): (0.99 - 0.1 * 1.9, "p (1 - lr wd) - lr (1 + momentum) g"),
        ("lion", "one_from_zero"): (0.99 - 0.1, "p (1 - lr wd) - lr; decay after the update .891, coupled .9"),
        ("ademamix", "one_from_zero"): (0.99 - 0.1 * 1.0005, "p (1 - lr wd) - lr (1 + alpha (1 - beta3))"),
        ("ademamix", "scheduled_one_from_zero"): (
            0.99 - 0.1 * (1 + 0.1 * (1 - beta3)),
            f"the same, alpha = 5 / 50, beta3 = {beta3:.12g}; counted from 0 .89; without schedules .88995",
        ),
        ("lamb", "one_from_zero"): (0.9, "p - lr |p|, as |r| r / |r| of one element"),
        ("lamb", "bounded_one_from_zero"): (1 - 0.1 * 0.5 * 1.1, "p - lr max_trust (1 + wd p); unbounded .9"),
        ("lamb", "max_unorm_inside_one_from_zero"): (1 - 0.1 * 0.5, "p - lr max_unorm |p|"),
        ("lamb", "max_unorm_decoupled_one_from_zero"): (0.99 - 0.1 * 0.5, "p (1 - lr wd) - lr max_unorm |p|"),
    }


def difference(a, b):
    """The largest |a - b| / max(1, |b|)."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b))))


# ---- peers ----------------------------------------------------------------------------------------------------------

F64, F32 = 1e-12, 1e-5


def grads(case, t):
    return [GRADIENTS[case.gradient](t, i) for i in range(len(case.p0))]


def torch_peer(make, states=(), dtype="float64", maximizes=False):
    """A class like those of torch.optim, on one tensor; `states` are the names of its states in our order."""

    def peer(case):
        import torch

        p = torch.nn.Parameter(torch.tensor(case.p0, dtype=getattr(torch, dtype)))
        optimizer = make(case.h, [p])
        for t in range(1, case.steps + 1):
            g = torch.tensor(grads(case, t), dtype=p.dtype)
            p.grad = -g if case.h["maximize"] and not maximizes else g
            optimizer.step()
        return p.detach().numpy(), [optimizer.state[p][name].numpy() for name in states]

    return peer


def betas(h):
    return tuple(h[name] for name in ("beta1", "beta2", "beta3") if name in h)


def load(name, module):
    return getattr(importlib.import_module(module), name)


def torch_adam(name):
    def make(h, p):
        shared = {"lr": h["lr"], "betas": betas(h), "eps": h["eps"], "weight_decay": h["weight_decay"]}
        return load(name, "torch.optim")(p, **shared, maximize=bool(h["maximize"]), foreach=False)

    return torch_peer(make, ("exp_avg", "exp_avg_sq"), maximizes=True)


def torch_sgd(name, module):
    def make(h, p):
        shared = {k: h[k] for k in ("lr", "momentum", "dampening", "weight_decay")}
        flags = {k: bool(h[k]) for k in ("nesterov", "maximize")}
        return load(name, module)(p, **shared, **flags, foreach=False)

    return torch_peer(make, maximizes=True)


def lion_pytorch(h, p):
    return load("Lion", "lion_pytorch")(p, h["lr"], betas(h), h["weight_decay"])


def pytorch_optimizer(name, states, **changes):
    def make(h, p):
        shared = {"lr": h["lr"], "betas": betas(h), "weight_decay": h["weight_decay"], "weight_decouple": True}
        more = {k: h[k] for k in ("alpha", "eps") if k in h}
        more |= changes | ({"t_alpha_beta3": h["t_alpha"] or None} if "alpha" in h else {})
        return load(name, "pytorch_optimizer")(p, **shared, **more, maximize=bool(h["maximize"]))

    return torch_peer(make, states, maximizes=True)


def timm_lamb(h, p):
    clip = h["max_trust"] == 1
    shared = {"lr": h["lr"], "betas": betas(h), "eps": h["eps"], "weight_decay": h["weight_decay"], "foreach": False}
    return load("Lamb", "timm.optim.lamb")(p, **shared, max_grad_norm=None, trust_clip=clip, always_adapt=True)


def torch_optimizer_lamb(**more):
    return lambda h, p: load("Lamb", "torch_optimizer")(
        p, lr=h["lr"], betas=betas(h), eps=h["eps"], weight_decay=h["weight_decay"], **more
    )


def bitsandbytes(name, **more):
    """The public classes on tensors of the CPU, f32 only; and the module's own reference of AdEMAMix."""

    def make(h, p):
        module = "bitsandbytes.optim" if name[0] != "_" else "bitsandbytes.optim.ademamix"
        shared = {"lr": h["lr"], "weight_decay": h["weight_decay"]}
        shared |= {k: h[k] for k in ("momentum", "alpha", "eps", "max_unorm") if k in h}
        shared |= {k: h[k] or None for k in ("t_alpha", "t_beta3") if k in h}
        shared |= {"betas": betas(h)} if "beta1" in h else {}
        return load(name, module)(p, **shared)

    return torch_peer(make, **{"dtype": "float32", **more})


def bitsandbytes_default(case):
    """LAMB of the backend for devices without kernels of their own, not compiled."""
    import torch

    ops = importlib.import_module("bitsandbytes.backends.default.ops")
    precondition, update = ops._optimizer_precondition_32bit.__wrapped__, ops._optimizer_update_32bit.__wrapped__
    h = case.h
    p = torch.tensor(case.p0)
    m, v, unorm = torch.zeros_like(p), torch.zeros_like(p), torch.zeros(1)
    for t in range(1, case.steps + 1):
        tensors = torch.tensor(grads(case, t)), p, m, v, unorm.zero_()
        rest = h["eps"], h["weight_decay"], t, h["lr"], 1.0, ops.ADAM
        precondition(*tensors, *betas(h), *rest)
        update(*tensors, h["max_unorm"], torch.norm(p), *betas(h), 0.0, 0.0, *rest)
    return p.numpy(), [m.numpy(), v.numpy()]


def optax_chain(optimizer, h, first=1):
    """`first`: what a schedule adds to the number of steps done, which is what optax calls it with."""
    import optax

    decay, lr, eps = optax.add_decayed_weights(h["weight_decay"]), h["lr"], {"eps": h.get("eps")}
    b = dict(zip(("b1", "b2", "b3"), betas(h)))
    if optimizer == "sgd":
        trace = optax.trace(h["momentum"], bool(h["nesterov"])) if h["momentum"] else optax.identity()
        parts = (decay, trace) if h["decay"] == "coupled" else (trace, decay)
        return optax.chain(*parts, optax.scale(-lr))
    if optimizer == "adam":
        return optax.chain(decay, optax.adam(lr, **b, **eps))
    if optimizer == "lion":
        return optax.lion(lr, **b, weight_decay=h["weight_decay"])
    if optimizer != "ademamix":
        return getattr(optax, optimizer)(lr, **b, **eps, weight_decay=h["weight_decay"])
    b["b3"] = lambda done: beta3_at(h, int(done) + first)
    alpha = lambda done: alpha_at(h, int(done) + first)  # noqa: E731
    return optax.contrib.ademamix(lr, **b, alpha=alpha, **eps, weight_decay=h["weight_decay"])


def optax_peer(optimizer, **more):
    def peer(case):
        import jax
        import optax

        jax.config.update("jax_enable_x64", True)
        p = jax.numpy.array(case.p0, jax.numpy.float64)
        chain = optax_chain(optimizer, case.h, **more)
        state = chain.init(p)
        for t in range(1, case.steps + 1):
            g = jax.numpy.array(grads(case, t), jax.numpy.float64)
            updates, state = chain.update(-g if case.h["maximize"] else g, state, p)
            p = optax.apply_updates(p, updates)
        return np.asarray(p), []

    return peer


def coupled(case):
    return case.h["decay"] == "coupled"


def plain_momentum(case):
    return coupled(case) and case.h["momentum"] > 0 and not case.h["dampening"] and not case.h["nesterov"]


def same_schedules(case):
    return case.h["t_alpha"] == case.h["t_beta3"]


def unbounded(case):
    """LAMB with the paper's decay, where the bound on the ratio changes nothing."""
    free = changed(lamb, max_trust=math.inf)
    inside = case.h["decay"] == "inside" and not case.h["max_unorm"]
    return inside and np.array_equal(case.run()[0], case.run(step=free)[0])


def uncorrected(case):
    """LAMB that is the same without corrections but for eps: they cancel in r / |r|."""
    return case.h["weight_decay"] == 0 and case.gradient == "hash" and unbounded(case)


def decoupled_unorm(case):
    return case.h["max_unorm"] > 0 and case.h["decay"] == "decoupled" and any(case.p0)


def decoupled_unorm_of_zero(case):
    return case.h["max_unorm"] > 0 and case.h["decay"] == "decoupled" and not any(case.p0)


def parameter_stays(h, t, p, g, s):
    return p, adamw(h, t, p, g, s)[1]


def usual_lamb(case):
    return case.h["decay"] == "inside" and not case.h["max_unorm"] and case.h["max_trust"] == 10


@dataclass
class Peer:
    name: str
    module: str
    run: Callable
    tolerance: float = F64
    has: Callable = lambda case: True
    changes: dict = field(default_factory=dict)
    # The formula that it follows, where that is not the reference.
    formula: Callable | None = None


def peers():
    yield "adam", Peer("torch.optim.Adam", "torch", torch_adam("Adam"))
    yield "adam", Peer("optax", "optax", optax_peer("adam"))
    yield "adam", Peer("bitsandbytes, CPU", "bitsandbytes", bitsandbytes("Adam"), F32, formula=adamw)
    yield "adamw", Peer("torch.optim.AdamW", "torch", torch_adam("AdamW"))
    yield "adamw", Peer("optax", "optax", optax_peer("adamw"))
    yield "adamw", Peer("bitsandbytes, CPU", "bitsandbytes", bitsandbytes("AdamW"), F32)

    yield "sgd", Peer("torch.optim.SGD", "torch", torch_sgd("SGD", "torch.optim"), has=coupled)
    sgdw = torch_sgd("SGDW", "timm.optim.sgdw")
    yield "sgd", Peer("timm SGDW", "timm", sgdw, has=lambda case: not coupled(case))
    yield "sgd", Peer("optax trace", "optax", optax_peer("sgd"), has=lambda case: not case.h["dampening"])
    yield "sgd", Peer("bitsandbytes, CPU", "bitsandbytes", bitsandbytes("SGD"), F32, plain_momentum)

    yield "lion", Peer("lion-pytorch", "lion_pytorch", torch_peer(lion_pytorch, ("exp_avg",)))
    yield "lion", Peer("pytorch-optimizer", "pytorch_optimizer", pytorch_optimizer("Lion", ("exp_avg",)))
    yield "lion", Peer("optax", "optax", optax_peer("lion"))
    yield "lion", Peer("bitsandbytes, CPU", "bitsandbytes", bitsandbytes("Lion"), F32)

    own = pytorch_optimizer("AdEMAMix", ("exp_avg", "exp_avg_sq", "exp_avg_slow"))
    yield "ademamix", Peer("pytorch-optimizer", "pytorch_optimizer", own, has=same_schedules)
    yield "ademamix", Peer("optax, schedules of t + 1", "optax", optax_peer("ademamix"))
    own = bitsandbytes("_ReferenceAdEMAMix", dtype="float64")
    yield "ademamix", Peer("bitsandbytes, its reference", "bitsandbytes", own)
    yield "ademamix", Peer("bitsandbytes, CPU", "bitsandbytes", bitsandbytes("AdEMAMix"), F32)
    own, has = optax_peer("ademamix", first=0), lambda case: case.h["t_alpha"] > 0 and same_schedules(case)
    yield "ademamix", Peer("optax, schedules of t", "optax", own, has=has, formula=ademamix_from_zero)

    own = torch_peer(timm_lamb, ("exp_avg", "exp_avg_sq"))
    has = lambda case: case.h["max_trust"] == 1 or unbounded(case)  # noqa: E731
    yield "lamb", Peer("timm, trust_clip where max_trust = 1", "timm", own, has=has)
    yield "lamb", Peer("optax", "optax", optax_peer("lamb"), has=unbounded)
    tiny, name = {"eps": 1e-30}, "torch-optimizer, unclamped, eps 1e-30"
    own = torch_peer(torch_optimizer_lamb(clamp_value=math.inf))
    yield "lamb", Peer(name, "torch_optimizer", own, has=uncorrected, changes=tiny)
    own = torch_peer(torch_optimizer_lamb())
    yield "lamb", Peer("torch-optimizer", "torch_optimizer", own, has=usual_lamb, formula=lamb_torch_optimizer)
    own = pytorch_optimizer("Lamb", ("exp_avg", "exp_avg_sq"))
    yield "lamb", Peer("pytorch-optimizer", "pytorch_optimizer", own, has=usual_lamb, formula=lamb_pytorch_optimizer)
    own = pytorch_optimizer("Lamb", ("exp_avg", "exp_avg_sq"), adam_debias=True)
    name = "pytorch-optimizer, adam_debias, eps 1e-30"
    yield "lamb", Peer(name, "pytorch_optimizer", own, has=uncorrected, changes=tiny)
    name, own, module = "bitsandbytes, default backend", bitsandbytes_default, "bitsandbytes"
    yield "lamb", Peer(name, module, own, F32, decoupled_unorm)
    yield "lamb", Peer(f"{name}, p = 0", module, own, F32, decoupled_unorm_of_zero, formula=parameter_stays)
    own = bitsandbytes("LAMB")
    yield "lamb", Peer("bitsandbytes, CPU", module, own, F32, decoupled_unorm, formula=lamb_norm_uncorrected)


def compare_peers(every):
    failed = False
    print("| optimizer | peer | cases | steps | tolerance | largest difference |\n|---|---|---:|---:|---:|---:|")
    for optimizer, peer in peers():
        name = peer.name + (f", as {peer.formula.__name__}" if peer.formula else "")
        try:
            importlib.import_module(peer.module)
        except ImportError:
            print(f"| {optimizer} | {name} | not installed | | | |")
            continue
        worst, where, count, steps = 0.0, "", 0, 0
        for case in every:
            if case.optimizer != optimizer or case.h["skip_zeros"] or not peer.has(case):
                continue
            case = case.with_changes(peer.changes)
            (p, states), (want_p, want_states) = peer.run(case), case.run(step=peer.formula)
            far = max(difference(a, b) for a, b in [(p, want_p), *zip(states, want_states)])
            count, steps = count + 1, steps + case.steps
            if not far <= worst:
                worst, where = far, case.name
        verdict = "" if worst <= peer.tolerance and count else f" DISAGREES {where}"
        failed |= bool(verdict)
        print(f"| {optimizer} | {name} | {count} | {steps} | {peer.tolerance:g} | {worst:.1e}{verdict} |", flush=True)
    return failed


# ---- wrong variants -------------------------------------------------------------------------------------------------


def decay_last(step):
    def wrong(h, t, p, g, s):
        p, s = step({**h, "weight_decay": 0.0}, t, p, g, s)
        return p * (1 - h["lr"] * h["weight_decay"]), s

    return wrong


def changed(step, **changes):
    return lambda h, t, p, g, s: step({**h, **changes}, t, p, g, s)


def damped_first(h, t, p, g, s):
    return sgd(h, t + 1, p, g, s)


def eps_before_correction(step):
    """The denominator (sqrt(v) + eps) / sqrt(1 - beta2^t)."""
    return lambda h, t, p, g, s: step({**h, "eps": h["eps"] / math.sqrt(1 - h["beta2"] ** t)}, t, p, g, s)


def eps_in_root(h, t, p, g, s):
    m, v, m_hat, _ = moments(h, t, g, *s)
    den = np.sqrt(v / (1 - h["beta2"] ** t) + h["eps"])
    return p - h["lr"] * (m_hat / den + h["weight_decay"] * p), (m, v)


def lion_coupled(h, t, p, g, s):
    return lion({**h, "weight_decay": 0.0}, t, p, g + h["weight_decay"] * p, s)


def lion_swapped(h, t, p, g, s):
    return lion({**h, "beta1": h["beta2"], "beta2": h["beta1"]}, t, p, g, s)


def lion_momentum_first(h, t, p, g, s):
    _, (m,) = lion(h, t, p, g, s)
    return p - h["lr"] * (np.sign(h["beta1"] * m + (1 - h["beta1"]) * g) + h["weight_decay"] * p), (m,)


def ademamix_from_zero(h, t, p, g, s):
    beta3, alpha = (beta3_at(h, t - 1), alpha_at(h, t - 1))
    return ademamix({**h, "beta3": beta3, "alpha": alpha, "t_alpha": 0, "t_beta3": 0}, t, p, g, s)


def ademamix_linear_beta3(h, t, p, g, s):
    x = min(t / h["t_beta3"], 1)
    return ademamix({**h, "beta3": (1 - x) * h["beta1"] + x * h["beta3"], "t_beta3": 0}, t, p, g, s)


def ademamix_slow_corrected(h, t, p, g, s):
    """m_hat of the slow average, for a beta3 that is not scheduled."""
    return ademamix({**h, "alpha": h["alpha"] / (1 - h["beta3"] ** t)}, t, p, g, s)


def lamb_bound_on_parameter(h, t, p, g, s):
    """phi(|p|) = min(|p|, 10) in place of a bound on the ratio."""
    p_norm = norm(p)
    scale = min(p_norm, 10) / p_norm if p_norm > 0 else 1.0
    return lamb({**h, "max_trust": math.inf, "lr": h["lr"] * scale}, t, p, g, s)


def lamb_uncorrected(h, t, p, g, s):
    m, v = (b * x + (1 - b) * y for b, x, y in ((h["beta1"], s[0], g), (h["beta2"], s[1], g * g)))
    r = m / (np.sqrt(v) + h["eps"]) + h["weight_decay"] * p
    return p - h["lr"] * lamb_factor(h, p, r) * r, (m, v)


def lamb_torch_optimizer(h, t, p, g, s):
    """torch-optimizer at its defaults: without corrections, phi(|p|) = min(|p|, 10)."""
    m, v = lamb_uncorrected(h, t, p, g, s)[1]
    r = m / (np.sqrt(v) + h["eps"]) + h["weight_decay"] * p
    p_norm, r_norm = min(norm(p), 10), norm(r)
    return p - h["lr"] * (p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1) * r, (m, v)


def lamb_pytorch_optimizer(h, t, p, g, s):
    """The same with a decoupled decay before |p| is taken, eps beside |r|, and lr / (1 - beta1^t)."""
    p = p * (1 - h["lr"] * h["weight_decay"])
    m, v = lamb_uncorrected(h, t, p, g, s)[1]
    r = m / (np.sqrt(v) + h["eps"])
    p_norm, r_norm = min(norm(p), 10), norm(r)
    trust = p_norm / (r_norm + h["eps"]) if p_norm > 0 and r_norm > 0 else 1
    return p - h["lr"] / (1 - h["beta1"] ** t) * trust * r, (m, v)


def lamb_norm_uncorrected(h, t, p, g, s):
    """max_unorm against the norm of m / (sqrt(v) + eps sqrt(1 - beta2^t)), as bitsandbytes on the CPU."""
    scale = math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t)
    return lamb({**h, "max_unorm": h["max_unorm"] * scale}, t, p, g, s)


def wrong_variants():
    """Optimizer, case, what is wrong, the wrong step."""
    for o, case in (
        ("adamw", "tenth"),
        ("sgd", "decoupled"),
        ("lion", "tenth"),
        ("ademamix", "tenth"),
        ("lamb", "max_unorm_decoupled_0.1"),
    ):
        yield o, case, "decay after the update", decay_last(OPTIMIZERS[o])
    yield "adamw", "tenth", "coupled", adam
    yield "adam", "tenth", "decoupled", adamw
    yield "adam", "eps", "eps before the correction", eps_before_correction(adam)
    yield "adamw", "tenth", "eps before the correction", eps_before_correction(adamw)
    yield "adamw", "tenth", "eps in the root", eps_in_root
    yield "sgd", "tenth", "decoupled", changed(sgd, decay="decoupled")
    yield "sgd", "decoupled", "coupled", changed(sgd, decay="coupled")
    yield "sgd", "coupled_dampening", "damped at the first step", damped_first
    yield "sgd", "coupled_dampening", "never damped", changed(sgd, dampening=0.0)
    yield "sgd", "coupled_nesterov", "without Nesterov", changed(sgd, nesterov=0)
    yield "sgd", "decoupled_nesterov", "without Nesterov", changed(sgd, nesterov=0)
    yield "lion", "tenth", "coupled", lion_coupled
    yield "lion", "tenth", "betas swapped", lion_swapped
    yield "lion", "tenth", "momentum updated first", lion_momentum_first
    yield "ademamix", "scheduled", "without schedules", changed(ademamix, t_alpha=0, t_beta3=0)
    yield "ademamix", "scheduled", "schedules counted from 0", ademamix_from_zero
    yield "ademamix", "scheduled", "beta3 linear", ademamix_linear_beta3
    yield "ademamix", "tenth", "slow average corrected", ademamix_slow_corrected
    yield "ademamix", "tenth", "without slow average", changed(ademamix, alpha=0.0)
    yield "lamb", "bounded", "without bound", changed(lamb, max_trust=math.inf)
    yield "lamb", "bounded_by_1", "without bound", changed(lamb, max_trust=math.inf)
    yield "lamb", "bounded", "bound on |p|", lamb_bound_on_parameter
    yield "lamb", "tenth", "decay outside the ratio", changed(lamb, decay="decoupled")
    yield "lamb", "tenth", "without corrections", lamb_uncorrected
    yield "lamb", "max_unorm_inside_0.1", "decay outside the norm", changed(lamb, decay="decoupled")
    yield "lamb", "max_unorm_decoupled_0.1", "norm not corrected", lamb_norm_uncorrected
    yield "lamb", "max_unorm_decoupled_0.1", "without max_unorm", changed(lamb, max_unorm=math.inf)


def compare_wrong(every, limit=1e-3):
    failed = False
    named = {(c.optimizer, c.name): c for c in every}
    print("\n| optimizer | case | wrong | 1 step | 2 steps | 100 steps |\n|---|---|---|---:|---:|---:|")
    for optimizer, name, what, step in wrong_variants():
        long = named[optimizer, f"{name}_100"]
        far = []
        for steps in 1, 2, 100:
            case = Case(name, optimizer, steps, long.h, long.gradient, long.p0)
            far.append(difference(case.run(step=step)[0], case.run()[0]))
        verdict = "" if max(far) > limit else " TOO NEAR"
        failed |= bool(verdict)
        print(f"| {optimizer} | {name} | {what} | " + " | ".join(f"{x:.1e}" for x in far) + f"{verdict} |")
    for case in every:
        if case.h["skip_zeros"]:
            far = difference(case.with_changes({"skip_zeros": 0}).run()[0], case.run()[0])
            columns = f"{far:.1e} | |" if case.steps == 1 else f"| | {far:.1e}"
            print(f"| {case.optimizer} | {case.name} | not skipped | {columns} |")
            failed |= far < limit
    return failed


# ---- the file -------------------------------------------------------------------------------------------------------

HEADER = """\
python tests/oracles/optimizers.py --write
Steps of optimizers from zero states, in f64. Tabs between columns; spaces in lists, those of name=value too; - is none.
Gradient of step t = 1, 2, .. and element i = 0, 1, ..: `one` is 1, `zero` is 0, and `hash` is, in u32 that wraps,
  x = 64 t + i; x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16;
  0 if i = 7 or x >> 29 = 0, else s ((x & 15) + 1) 2^(e - 4 - (x >> 4 & 7)), exact in f32,
  s = (-1)^i, and its negative if (x >> 8 & 3) = 0; e = 0 for i < 8, and 5, -8, -18, -30 for i = 8, 9, 10, 11.
maximize=1: the negative gradient, before a coupled decay. skip_zeros=1: elements whose gradient is 0 keep p and states,
without decay; t counts on; the buffer of SGD is undamped at t = 1 only. t_alpha, t_beta3, max_unorm: 0 is none.
states: adam, adamw, lamb m, v; sgd buffer; lion m; ademamix m (fast), v, slow.
f32: the largest |x - p| / max(1, |p|) of the same lines in plain f32, states included: a hint for tolerances.
factor of lamb: the smallest and the largest over the steps.
Closed forms of one step at p = g = 1, lr = wd = .1, eps left out:
"""


def number(x):
    return repr(float(x)) if x else "0"


def write(every):
    lines = [f"# {line}" for line in HEADER.splitlines()]
    for (optimizer, name), (value, text) in closed_forms().items():
        lines.append(f"#   {optimizer} {name}: {value:.12g} = {text}")
    lines.append("case\toptimizer\thyper\tsteps\tgradient\tp0\tp\tstate1\tstate2\tstate3\tf32\tfactor")
    for c in every:
        p, s = c.run()
        single_p, single_s = c.run(dtype=np.float32)
        single = max(difference(a, b) for a, b in [(single_p, p), *zip(single_s, s)])
        factors = "-"
        if c.optimizer == "lamb":
            seen = []

            def spy(h, t, p, g, s, seen=seen):
                _, _, m_hat, den = moments(h, t, g, *s)
                r = m_hat / den + (h["weight_decay"] * p if h["decay"] == "inside" else 0)
                seen.append(lamb_factor(h, p, r))
                return lamb(h, t, p, g, s)

            c.run(step=spy)
            factors = f"{min(seen):.4g} {max(seen):.4g}"
        columns = [" ".join(map(number, x)) for x in (c.p0, p, *s)] + ["-"] * (3 - len(s))
        hyper = " ".join(f"{k}={v if isinstance(v, str) else f'{v:g}'}" for k, v in c.h.items())
        columns = [c.name, c.optimizer, hyper, str(c.steps), c.gradient, *columns, f"{single:.1e}", factors]
        lines.append("\t".join(columns))
    GOLDEN.write_text("\n".join(lines) + "\n")


def check(every):
    """What the vectors rest on: closed forms, gradients that f32 holds, signs in Lion that f32 cannot turn."""
    named = {(c.optimizer, c.name): c for c in every}
    assert len(named) == len(every)
    for key, (value, _) in closed_forms().items():
        assert abs(named[key].run()[0][0] - value) < 3e-7, key
    for t in range(1, 101):
        assert all(float(np.float32(hashed(t, i))) == hashed(t, i) for i in range(12))
    for c in every:
        assert all(k in COMMON or isinstance(v, str) or float(f"{v:g}") == v for k, v in c.h.items())
        if c.optimizer == "lion":

            def margin(h, t, p, g, s):
                a, b = h["beta1"] * s[0], (1 - h["beta1"]) * g
                size = np.maximum(np.abs(a), np.abs(b))
                assert np.all((np.abs(a + b) > 1e-4 * size) | (size == 0)), (c.name, t)
                return lion(h, t, p, g, s)

            c.run(step=margin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    every = list(cases())
    check(every)
    if arguments.write:
        write(every)
        return 0
    peers_failed = compare_peers(every)
    return int(compare_wrong(every) or peers_failed)


if __name__ == "__main__":
    sys.exit(main())
