"""Raw HTTP, for requests that no SDK would send."""
import json


def post(path, body, *headers, version="1.1", length=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: quire", "Content-Type: application/json", *headers]
    if length is not False:
        lines.append(f"Content-Length: {len(data) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Reader:
    """Reads responses from a socket, one after another."""

    def __init__(self, sock):
        self.sock = sock
        self.buffer = b""
        self.closed = False

    def more(self):
        data = self.sock.recv(65536)
        self.closed = not data
        self.buffer += data
        return data

    def until(self, mark):
        while mark not in self.buffer:
            if not self.more():
                raise EOFError(f"the connection ended after {self.buffer[-200:]}")
        head, self.buffer = self.buffer.split(mark, 1)
        return head

    def exactly(self, n):
        while len(self.buffer) < n:
            if not self.more():
                raise EOFError(f"the connection ended after {self.buffer[-200:]}")
        data, self.buffer = self.buffer[:n], self.buffer[n:]
        return data

    def head(self):
        lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
        return int(lines[0].split()[1]), headers

    def chunks(self):
        """The chunks of a chunked body."""
        while True:
            size = int(self.until(b"\r\n"), 16)
            data = self.exactly(size)
            assert self.exactly(2) == b"\r\n"
            if size == 0:
                return
            yield data

    def answer(self):
        """Status, headers and body of the next response."""
        status, headers = self.head()
        if headers.get("transfer-encoding") == "chunked":
            return status, headers, b"".join(self.chunks())
        if "content-length" in headers:
            return status, headers, self.exactly(int(headers["content-length"]))
        while self.more():
            pass
        data, self.buffer = self.buffer, b""
        return status, headers, data


def events(body):
    """The payloads of server-sent events, without comments."""
    out = []
    for event in body.decode().split("\n\n"):
        if event.startswith("data: "):
            out.append(event[len("data: "):])
        else:
            assert event == "" or event.startswith(":"), event
    return out


def error_of(body):
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    return error
