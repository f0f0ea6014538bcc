"""Freed memory is kept for the next tensors: counted in pages that the system had to give, in a process of its own.

It has no huge pages, of which the system gives as many as it happens to have; and of three rounds that one counts in
which no page was moved to another memory node.
"""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, json, resource
import numpy as np
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
from workbench.methods.p_rge.zeroth_order.loading import keep_freed_memory

def layers():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        states = [np.ones(3_000_000 // 8) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

layers()
before = layers()
kept = keep_freed_memory()
layers()
print(json.dumps([before, kept, min(layers() for _ in range(3))]))
"""


def run(**chosen):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    } | chosen
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    return json.loads(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept():
    before, kept, after = run()
    if not kept:
        pytest.skip("another allocator than glibc's")
    pages = 20 * 8 * 3_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert before > pages / 2
    assert after < pages / 20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_the_user_chose_stays():
    before, kept, after = run(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept
    assert after > before / 2
