"""Records five default steps of torch.optim.AdamW in f32 for tests/adamw.rs.

    pip install torch==2.15.0 numpy==2.4.6
    python tests/oracles/adamw.py > tests/data/adamw_torch.tsv

A line an element, all f32 as eight hexadecimal digits: the parameter, five gradients, and what five steps make of the
parameter and its two moments. Gradients have every magnitude from 1e-12 to 1e3, a constant part or none, and some zeros.
"""

import sys

import numpy as np
import torch

N, STEPS = 256, 5


def main():
    rng = np.random.default_rng(2026)
    p = rng.standard_normal(N).astype(np.float32)
    size = (10.0 ** rng.uniform(-12, 3, N)).astype(np.float32)
    mean = rng.choice([0.0, 1.0, -3.0], N).astype(np.float32)
    g = (rng.standard_normal((STEPS, N)).astype(np.float32) + mean) * size
    g[:, ::32] = 0
    g[1::2, 1::16] = 0
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    for step in range(STEPS):
        parameter.grad = torch.from_numpy(g[step].copy())
        optimizer.step()
    state = optimizer.state[parameter]
    columns = [p, *g, parameter.detach().numpy(), state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()]
    print(f"# python tests/oracles/{sys.argv[0].rsplit('/', 1)[-1]}, torch {torch.__version__}, numpy {np.__version__}")
    print("p\tg1\tg2\tg3\tg4\tg5\tp5\tm5\tv5")
    for row in zip(*(column.view(np.uint32) for column in columns), strict=True):
        print("\t".join(f"{bits:08x}" for bits in row))


if __name__ == "__main__":
    main()
