"""Which jobs of the operator coverage the fast tests run: a fixed part, and one that rotates.

In: the date, or the environment variable `VARIABLE`. Out: jobs (operator, dtype, part).
"""

from __future__ import annotations

import os
import random
from datetime import date

from dev.coverage.run import jobs_for
from dev.coverage.worker import Job

VARIABLE = "DEUTERON_TEST_OPERATORS"
SEED = int(os.environ.get(VARIABLE) or date.today().strftime("%Y%m%d"))
ROTATING = 60  # jobs
SAMPLES = 4  # of a job

# One operator or more of each family, and where there were bugs.
FIXED = {
    "forward": (
        "add:int32 div.floor_rounding:float16 pow:int64 where:complex64 special.i0e:float32 "
        "sum:bfloat16 argmax:int64 std_mean:float64 cumsum:float16 logcumsumexp:float32 "
        "nn.functional.layer_norm:bfloat16 softmax:float16 nn.functional.gelu:float32 "
        "nn.functional.max_pool2d:bfloat16 nn.functional.adaptive_max_pool2d:float32 "
        "nn.functional.interpolate.bilinear:float32 nn.functional.grid_sample:float32 "
        "nn.functional.embedding:float32 nn.functional.conv2d:float32 matmul:int64 einsum:float32 "
        "gather:bool scatter_reduce.amax:float32 index_put:int32 take:bool searchsorted:float32 "
        "sort:float32 unique:int64 masked_select:float32 nonzero:bool item:float32 fft.fft:float32 "
        "linalg.svd:float32 cat:int32 roll:float32 nn.functional.pad.reflect:float32 "
        "as_strided:float32 nn.functional.dropout:float32 randint:int64"
    ),
    "backward": (
        "mul:complex64 nn.functional.cross_entropy:float32 nn.functional.batch_norm:float32 "
        "norm:float32 index_select:float32 nn.functional.avg_pool2d:float32 amax:float32 "
        "nn.functional.scaled_dot_product_attention:float32"
    ),
    "layouts": "copysign:float32 mean:float32 split:float32 nn.functional.linear:float32",
    "dynamic": "add:float32 reshape:float32 unbind:float32 nn.functional.avg_pool1d:float32",
    "inplace": "clamp:float32 index_add:float32",
    "numbers": "nn.functional.leaky_relu:float32 clamp:int64 roll:float32",
    "lists": "nn.functional.avg_pool2d:float32 sum:float32 amax:int64",
    "mixed": "add:float32 where:float16 nn.functional.linear:float32 index_put:int32",
    "zeros": (
        "div.no_rounding_mode:float32 copysign:float32 atan2:float32 softmax:bfloat16 "
        "nn.functional.grid_sample:float32"
    ),
    "chains": "nn.functional.gelu:bfloat16 nn.functional.layer_norm:bfloat16 sum:float16",
}


def fixed() -> list[Job]:
    out = []
    for part, text in FIXED.items():
        for word in text.split():
            name, dtype = word.rsplit(":", 1)
            out.append(Job(name, dtype, part, most=SAMPLES))
    return out


def rotating() -> list[Job]:
    return random.Random(SEED).sample(jobs_for(most=SAMPLES), ROTATING)
