"""Print what Triton knows of each jit function, as JSON: `python keys.py [MODULE[:FUNCTION] …]`.

These modules are imported first, and their functions called. A process of its own: TRITON_INTERPRET
is read when kernels are decorated.

key : as it was made
whole : the key that it has once all constants of all that it calls are known, with their values now
compared : constants that each launch compares
unkeyed : names of its code that are neither part of a key nor of Triton
twice : constants that it knows two values of by one name
"""

from __future__ import annotations

import builtins
import dis
import importlib
import json
import pkgutil
import sys
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITCallable, JITFunction

import kvq_attention.triton as package


def main(first: list[str]) -> None:
    for name in first:
        module, _, function = name.partition(":")
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = sorted(module.name for module in modules)
    functions = {
        f"{found.__module__}.{found.__name__}": found
        for module in map(importlib.import_module, names)
        for found in vars(module).values()
        if isinstance(found, JITFunction)
    }
    told = {
        name: {"key": each.hash, "compared": len(each.used_global_vals), "unkeyed": unkeyed(each)}
        for name, each in functions.items()
    }
    before: list[str] = []
    while before != (keys := [key_anew(each) for each in functions.values()]):
        before = keys
    for (name, each), key in zip(functions.items(), keys, strict=True):
        told[name] |= {"whole": key, "twice": twice(each)}
    print(json.dumps(told))


def key_anew(function: Any) -> str:
    """Its own name stands for nothing where it is defined, even if it calls itself."""
    own = function.__globals__.pop(function.__name__)
    function.hash = None
    try:
        return str(function.cache_key)
    finally:
        function.__globals__[function.__name__] = own


def unkeyed(function: Any) -> list[str]:
    code = dis.get_instructions(function.fn)
    names = {each.argval for each in code if each.opname == "LOAD_GLOBAL"} - {function.__name__}
    known = {name: function.__globals__[name] for name in names if not hasattr(builtins, name)}
    return [
        name
        for name, value in known.items()
        if not (isinstance(value, tl.constexpr | JITCallable) or value in (triton, tl))
    ]


def twice(function: Any) -> list[str]:
    values: dict[str, str] = {}
    known = function.used_global_vals.items()
    return [
        name for (name, _), (value, _) in known if values.setdefault(name, str(value)) != str(value)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
