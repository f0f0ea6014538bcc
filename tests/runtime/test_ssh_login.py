"""What ssh writes when a login fails becomes one sentence and a mend."""

from __future__ import annotations

import pytest

from workbench.runtime.ssh_login import BEGAN, Login, failure_of

IN = 'Authenticated to h ([10.0.0.4]:22) using "publickey".\n'
CHANGED = "@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@\nHost key verification failed.\n"
PROXY = "Connection closed by UNKNOWN port 65535\n"


@pytest.mark.parametrize(
    ("login", "found", "todo"),
    [
        (
            Login("No ED25519 host key is known for h.\nHost key verification failed.\n", 255),
            "not known yet",
            "--trust",
        ),
        (Login(CHANGED, 255), "not the one", "--forget"),
        (Login("pi@h: Permission denied (publickey).\n", 255), "does not accept the key", "ssh-copy-id"),
        (
            Login('Load key "/k": invalid format\npi@h: Permission denied (publickey).\n', 255),
            "'/k' cannot be read: inv",
            "key =",
        ),
        (Login("ssh: connect to host h port 22: Connection refused\n", 255), "Nothing listens", "systemctl"),
        (Login("ssh: connect to host h port 22: No route to host\n", 255), "cannot be reached", "cable"),
        (Login("ssh: Could not resolve hostname h: Name or service not known\n", 255), "name is not known", "address"),
        (
            Login("/home/me/.ssh/config: line 3: Bad configuration option: usr\n", 255),
            "Bad configuration option: usr",
            "ssh ADDRESS",
        ),
        (Login(IN, 127, errors="Hello!\nsh: python3: not found\n"), "no python3", "apt install"),
        # A login shell that ends or waits: a banner is never the cause.
        (Login(IN, 1, "This account is currently not available.\n", "Keep out.\n"), "says: This account is", "chsh"),
        (Login(IN, 1, "", "Keep out.\n"), "with status 1 before Python starts.", "chsh"),
        (Login(IN, None, "", "Keep out.\n"), "does not come to start Python", ".bashrc"),
        (Login("", None), "did not answer", "cable"),
        # A device's own words on stderr, and a server's farewell, are not ssh's.
        (Login(IN, 255, errors=CHANGED), "before Python starts.", "chsh"),
        (
            Login("Received disconnect from 10.0.0.4 port 22:2: x\n" + CHANGED, 255),
            "ssh ended with status 255",
            "ssh ADDRESS",
        ),
        (Login(IN, 255, errors=CHANGED + BEGAN.decode(), has_begun=True), "ended with status 255.", "cable"),
        (
            Login(IN + "Transferred: sent 1, received 2 bytes, in 3.0 seconds\n", 0, has_begun=True),
            "ended with status 0.",
            "cable",
        ),
        (Login(IN + "Timeout, server h not responding.\n", 255, has_begun=True), "Timeout, server h", "cable"),
        # A jump host: its ssh writes to our stderr.
        (
            Login(PROXY, 255, errors="Host key verification failed.\n"),
            "such as a jump host, is not trusted",
            "ssh JUMPHOST",
        ),
        (
            Login(PROXY, 255, errors="ssh: Could not resolve hostname j: Name\n"),
            "way to it is closed: ssh: Could not",
            "ssh ADDRESS",
        ),
        (Login("No ED25519 host key is known for h.\n" + PROXY, 255), "not known yet", "--trust"),
    ],
)
def test_what_ssh_says_becomes_one_sentence_and_a_mend(login: Login, found: str, todo: str) -> None:
    failure = failure_of(login)
    assert found in failure.found and todo in failure.todo
