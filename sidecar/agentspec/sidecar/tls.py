"""TLS of the TCP listener: both sides show certificates, and files that change are read at the next handshake."""

from __future__ import annotations

from pathlib import Path

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from agentspec.sidecar.options import OptionsError
from agentspec.sidecar.server_options import ServerOptions

log = structlog.get_logger()


class Certificates:
    """The files of a server's TLS configuration.

    Args:
        cert: the server's chain, PEM.
        key: its private key, PEM.
        client_ca: authorities of the clients, PEM.

    Raises:
        OptionsError: a file can't be read, is malformed, or key and certificate don't belong together.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path) -> None:
        self._paths = (key, cert, client_ca)
        self._changed_at = self._mtimes()
        self._configuration = self._read()

    @classmethod
    def of(cls, options: ServerOptions) -> Certificates | None:
        """The certificates that the options name; None without TCP."""
        if options.tls_cert is None or options.tls_key is None or options.tls_client_ca is None:
            return None
        return cls(options.tls_cert, options.tls_key, options.tls_client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that ask clients for certificates and follow the files."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed,  # type: ignore[arg-type]  # the stub leaves out that None keeps the last one
            require_client_authentication=True,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake: a new configuration, or None to keep the last."""
        try:
            changed_at = self._mtimes()
            if changed_at == self._changed_at:
                return None
            configuration = self._read()
        except OptionsError as error:
            log.warning("certificates_not_read", error=str(error))
            return None
        self._changed_at = changed_at
        log.info("certificates_read")
        return configuration

    def _mtimes(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in self._paths)
        except OSError as error:
            raise OptionsError(f"agentspec option 'tls_cert': {error.filename}: {error.strerror}") from None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        names = ("tls_key", "tls_cert", "tls_client_ca")
        contents: list[bytes] = []
        for name, path in zip(names, self._paths, strict=True):
            try:
                contents.append(path.read_bytes())
                if name == "tls_key":
                    key = load_pem_private_key(contents[-1], None).public_key()
                else:
                    certificates = x509.load_pem_x509_certificates(contents[-1])
            except (OSError, ValueError, TypeError) as error:
                raise OptionsError(f"agentspec option {name!r}: {path}: {error}") from None
            if name == "tls_cert" and _bytes_of(key) != _bytes_of(certificates[0].public_key()):
                raise OptionsError(f"agentspec option 'tls_key': {self._paths[0]}: not the key of {path}")
        return grpc.ssl_server_certificate_configuration([(contents[0], contents[1])], contents[2])


def _bytes_of(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
