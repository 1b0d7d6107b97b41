"""A server that is ready at once and knows tenants and keys; run by its text, so it imports nothing of ours."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TENANTS: dict[str, list[dict[str, object]]] = {}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.endswith("/keys"):
            tenant = self.path.split("/")[3]
            self._answer(200, {"keys": TENANTS.get(tenant, [])})
        else:
            self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/admin/tenants":
            TENANTS.setdefault(body["name"], [])
            self._answer(201, body | {"created_at": "now"})
            return
        tenant = self.path.split("/")[3]
        number = len(TENANTS[tenant])
        key: dict[str, object] = {
            "id": f"k{number}",
            "tenant": tenant,
            "name": "",
            "scopes": ["inference"],
            "created_at": "now",
        }
        TENANTS[tenant].append(key)
        self._answer(201, {"key": key, "secret": f"secret of {tenant} {number}"})

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def serve() -> None:
    arguments = sys.argv[1:]
    port = int(arguments[arguments.index("--metrics-port") + 1])
    print("serving", arguments, flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve()
