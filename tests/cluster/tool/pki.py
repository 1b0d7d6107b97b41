"""Certificates of one throw-away cluster, made by the openssl command, and the kubeconfigs that carry them."""

import base64
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

_OPENSSL_SECONDS = 30.0
_DAYS = "365"


class Pki:
    """One certificate authority in `folder`; `issue` adds a certificate and key signed by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"
        self.service_account_key = folder / "sa.key"
        self.service_account_public = folder / "sa.pub"

    def create(self) -> None:
        self.folder.mkdir(mode=0o700)
        self._key("ca")
        usage = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
        extensions = [part for line in usage for part in ("-addext", line)]
        subject = ("-subj", "/CN=loraplane-test-ca", "-days", _DAYS)
        self._openssl("req", "-x509", "-new", "-key", "ca.key", "-sha256", *subject, "-out", "ca.crt", *extensions)
        self._key("sa")
        self._openssl("pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def issue(self, name: str, subject: str, *, serves: Sequence[str] = ()) -> None:
        """`serves`: subject alternative names of a server's certificate; without them it is a client's."""
        self._key(name)
        lines = ["keyUsage=critical,digitalSignature", f"extendedKeyUsage={'serverAuth' if serves else 'clientAuth'}"]
        if serves:
            lines.append(f"subjectAltName={','.join(serves)}")
        (self.folder / f"{name}.ext").write_text("\n".join(lines) + "\n")
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", _DAYS, "-sha256")
        files = ("-in", f"{name}.csr", "-extfile", f"{name}.ext", "-out", f"{name}.crt")
        self._openssl("x509", "-req", *files, *signer)

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def _key(self, name: str) -> None:
        self._openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", f"{name}.key")
        self.key(name).chmod(0o600)

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=self.folder, capture_output=True, timeout=_OPENSSL_SECONDS, check=True)


def client_kubeconfig(pki: Pki, name: str, server: str, target: Path) -> None:
    """A kubeconfig with the client certificate of `name` inside."""
    user = {
        "client-certificate-data": _encoded(pki.certificate(name)),
        "client-key-data": _encoded(pki.key(name)),
    }
    write_kubeconfig(pki.ca, user, server, target)


def write_kubeconfig(ca: Path, user: dict[str, str], server: str, target: Path) -> None:
    """JSON is YAML; the file is the owner's only, since it holds a credential."""
    cluster = {"server": server, "certificate-authority-data": _encoded(ca)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "loraplane", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "loraplane", "context": {"cluster": "loraplane", "user": "user"}}],
        "current-context": "loraplane",
    }
    target.touch(0o600)
    target.write_text(json.dumps(content, indent=1))


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
