"""Print what Triton knows of each jit function, as JSON: `python keys.py [MODULE …]`.

These modules are imported first; one that has `smaller()`, as exercise_extend.py, is made so. A
process of its own: TRITON_INTERPRET is read when kernels are decorated.

key : as it was made
whole : the key that it has once all constants of all that it calls are known
changed : constants that are not what they were when the key was made: no launch would be accepted
twice : constants that it knows two values of by one name
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Any

from triton.runtime.jit import JITFunction

import kvq_attention.triton as package


def main(first: list[str]) -> None:
    for name in first:
        getattr(importlib.import_module(name), "smaller", lambda: None)()
    names = (
        found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    )
    functions = {
        f"{found.__module__}.{found.__name__}": found
        for module in map(importlib.import_module, names)
        for found in vars(module).values()
        if isinstance(found, JITFunction)
    }
    told = {
        name: {"key": each.hash, "changed": changed(each), "twice": twice(each)}
        for name, each in functions.items()
    }
    before: list[str] = []
    while before != (keys := [key_anew(each) for each in functions.values()]):
        before = keys
    for name, key in zip(functions, keys, strict=True):
        told[name]["whole"] = key
    print(json.dumps(told))


def key_anew(function: Any) -> str:
    own = function.__globals__.pop(function.__name__)  # one that calls itself has no name as yet
    function.hash = None
    try:
        return str(function.cache_key)
    finally:
        function.__globals__[function.__name__] = own


def changed(function: Any) -> list[str]:
    known = function.used_global_vals.items()
    return [name for (name, _), (value, where) in known if where.get(name) != value]


def twice(function: Any) -> list[str]:
    values: dict[str, str] = {}
    known = function.used_global_vals.items()
    return [
        name for (name, _), (value, _) in known if values.setdefault(name, str(value)) != str(value)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
