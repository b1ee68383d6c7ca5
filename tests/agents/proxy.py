"""A TCP proxy that damages one byte on its way to the store, as a bad cable does."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards loopback connections to `port`; flips one bit of one byte, `after` bytes into a connection."""

    def __init__(self, port: int, after: int) -> None:
        self.port = port
        self.after = after
        self.flipped = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                for one, other, damage in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._forward, args=(one, other, damage), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, damage: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen += len(data)
                with self._lock:
                    if damage and not self.flipped and seen > self.after:
                        self.flipped += 1
                        data = bytes([data[0] ^ 1]) + data[1:]
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()
