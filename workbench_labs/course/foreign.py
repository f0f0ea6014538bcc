"""What runs inside the isolated process: it defines one student's function and answers calls of it.  Standard library.

Lines of JSON: first {"source", "name"}, then one {"arguments"} for each call; each is answered by {"result"} or
{"error"}.  The judge stays outside: whatever this process prints is an answer to a question, never a verdict.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints is no answer

    def answer(**said: object) -> None:
        try:
            text = json.dumps(said)
        except (TypeError, ValueError) as error:
            text = json.dumps({"error": f"TypeError: {error}"})
        answers.write(text + "\n")
        answers.flush()

    resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))  # counted in this user namespace alone
    asked = json.loads(sys.stdin.readline())
    scope: dict[str, object] = {"__name__": "hand_in"}
    try:
        exec(compile(asked["source"], "hand-in", "exec"), scope)
        function = scope[asked["name"]]
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
