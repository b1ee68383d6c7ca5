"""A small SMTP relay on loopback (RFC 5321): it stands for somebody else's program and keeps what it took."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.message import Message


class Relay:
    """What was taken. `refuses`: answer 550 to every recipient; `busy`: answer 451 to every mail."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.mails: list[tuple[str, Message]] = []
        self.refuses = self.busy = False

    def text(self) -> str:
        """Return the words of the newest mail."""
        payload = self.mails[-1][1].get_payload(decode=True)
        assert isinstance(payload, bytes)
        return payload.decode()


class _Handler(socketserver.StreamRequestHandler):
    relay: Relay

    def handle(self) -> None:
        self._say("220 relay")
        to = ""
        for line in iter(self.rfile.readline, b""):
            verb = line.decode().strip().upper()
            if verb.startswith("EHLO"):
                self._say("250 relay")
            elif verb.startswith("MAIL"):
                self._say("451 later" if self.relay.busy else "250 ok")
            elif verb.startswith("RCPT"):
                to = line.decode().partition("<")[2].partition(">")[0]
                self._say(f"550 no mailbox {to}" if self.relay.refuses else "250 ok")
            elif verb == "DATA":
                self._say("354 go on")
                body = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.relay.mails.append((to, message_from_bytes(body)))
                self._say("250 taken")
            elif verb == "QUIT":
                self._say("221 bye")
                return
            else:
                self._say("250 ok")

    def _say(self, words: str) -> None:
        self.wfile.write(f"{words}\r\n".encode())


@contextmanager
def relay() -> Iterator[Relay]:
    """Start a relay on a free port of loopback; it stops at the end."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler)
    made = Relay(server.server_address[1])
    server.RequestHandlerClass = type("Handler", (_Handler,), {"relay": made})
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
