"""What runs inside the isolated process: it defines one student's function and answers calls of it.  Standard library.

Lines of JSON: first {"source", "name"}, then one {"arguments"} for each call; each is answered by {"result"} or
{"error"}.  The judge stays outside: whatever this process prints is an answer to a question, never a verdict.
"""

import ctypes
import errno
import json
import os
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data."""
_CLONE_THREAD, _OTHER_CALLS = 0x10000, 0x40000000
_CALLS = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
"""By machine: its audit number, and the numbers of clone, and of fork and vfork.  clone3 is 435 on both."""


def forbid_processes() -> None:
    """Let this process and what it runs start threads, but no process.  Raises OSError where that is not possible.

    A limit on their number (RLIMIT_NPROC) does not hold for root.
    """
    machine, clone, forks = _CALLS[os.uname().machine]
    refused, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS  # without clone3 the C library takes clone
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, refused),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_CALLS),
        (_RETURN, 0, 0, refused),
        (_EQUAL, 0, 1, 435),
        (_RETURN, 0, 0, missing),
    ]
    for fork in forks:
        program += [(_EQUAL, 0, 1, fork), (_RETURN, 0, 0, refused)]
    program += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    instructions = ctypes.create_string_buffer(code, len(code))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions)))
    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for words in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), described, zero, zero),
    ):
        if library.prctl(*words):
            raise OSError(ctypes.get_errno(), "This kernel cannot forbid processes.")


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints is no answer

    def answer(**message: object) -> None:
        try:
            text = json.dumps(message, default=lambda value: value.tolist())  # NumPy's and torch's numbers
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            text = json.dumps({"error": f"TypeError: {error}"})
        answers.write(text + "\n")
        answers.flush()

    forbid_processes()
    request = json.loads(sys.stdin.readline())
    scope: dict[str, object] = {"__name__": "hand_in"}
    try:
        exec(compile(request["source"], "hand-in", "exec"), scope)
        function = scope[request["name"]]
        answer(result=None)
    except BaseException as error:
        answer(error=f"{type(error).__name__}: {error}")
        return
    for line in sys.stdin:
        try:
            answer(result=function(*json.loads(line)["arguments"]))  # type: ignore[operator]
        except BaseException as error:
            answer(error=f"{type(error).__name__}: {error}")


main()
