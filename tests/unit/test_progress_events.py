from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from raytrain_bert.progress.events import plain, to_json_line


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_json_line_is_strict_and_holds_null_for_nan_and_infinities():
    event = {
        "event": "steps",
        "records": [{"loss": math.nan, "grad_norm": math.inf, "rows": 3}, {"loss": 0.5, "grad_norm": -math.inf}],
    }
    line = to_json_line(event)
    assert "\n" not in line
    assert json.loads(line, parse_constant=refuse) == {
        "event": "steps",
        "records": [{"loss": None, "grad_norm": None, "rows": 3}, {"loss": 0.5, "grad_norm": None}],
    }


def test_scalars_and_arrays_of_numpy_and_torch_become_pythons_own():
    event = {
        "float32": np.float32(0.25),
        "float64": np.float64(0.5),
        "int64": np.int64(7),
        "bool": np.bool_(True),
        "scalar": torch.tensor(2.5),
        "array": np.arange(3),
        "tensor": torch.tensor([[1, 2]]),
        "nan": np.float32("nan"),
        "pair": (1, "a"),
        "path": Path("runs") / "a",
        "none": None,
    }
    expected = {
        "float32": 0.25,
        "float64": 0.5,
        "int64": 7,
        "bool": True,
        "scalar": 2.5,
        "array": [0, 1, 2],
        "tensor": [[1, 2]],
        "pair": [1, "a"],
        "path": "runs/a",
        "none": None,
    }
    made = plain(event)
    assert math.isnan(made.pop("nan"))
    assert made == expected
    assert [type(value) for value in made.values()] == [type(value) for value in expected.values()]
    assert json.loads(to_json_line(event), parse_constant=refuse) == {**expected, "nan": None}


def test_text_stays_readable_in_a_json_line():
    assert to_json_line({"text": "größer 大"}) == '{"text": "größer 大"}'


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="object cannot be part of an event"):
        plain({"what": object()})


def test_importing_the_screen_needs_neither_torch_nor_ray():
    code = (
        "import sys\n"
        "from raytrain_bert.progress import board, events, screen, streams\n"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
