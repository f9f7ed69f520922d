"""How Faust's client logs in to the brokers: the same librdkafka properties as every other client of loom.

What cannot be carried over is refused, never left out: a client that connects more openly than it was told to is worse
than one that does not start.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

from faust.auth import SASLCredentials, SSLCredentials

from loom.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_KNOWN: Final = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
        "enable.ssl.certificate.verification",
    }
)


def broker_credentials(kafka: Mapping[str, Any]) -> SASLCredentials | SSLCredentials | None:
    """Return Faust's credentials for librdkafka's properties; None for a plain connection.

    Raises:
        ConfigError: a property of ``ssl.*`` or ``sasl.*`` has no counterpart in Faust's client, or cannot be used.
    """
    for name in kafka:
        if name.startswith(("ssl.", "sasl.", "security.", "enable.ssl.")) and name not in _KNOWN:
            raise _unusable(
                name, "Faust's client has nothing like it", f"leave it out, or use {_listed(_KNOWN)}"
            )
    protocol = str(kafka.get("security.protocol", "plaintext")).upper()
    if protocol not in _PROTOCOLS:
        raise _unusable(
            "security.protocol", f"{protocol[:32]!r} is no protocol", f"use {_listed(_PROTOCOLS)}"
        )
    context = _context(kafka) if protocol.endswith("SSL") else None
    if not protocol.startswith("SASL"):
        return None if context is None else SSLCredentials(context)
    mechanism = str(kafka.get("sasl.mechanisms", kafka.get("sasl.mechanism", "GSSAPI"))).upper()
    if mechanism not in _MECHANISMS:
        raise _unusable(
            "sasl.mechanisms", f"{mechanism[:32]!r} is not supported", f"use {_listed(_MECHANISMS)}"
        )
    return SASLCredentials(
        username=str(kafka.get("sasl.username", "")),
        password=str(kafka.get("sasl.password", "")),
        ssl_context=context,
        mechanism=mechanism,
    )


def _context(kafka: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=kafka.get("ssl.ca.location") or None, cadata=kafka.get("ssl.ca.pem") or None
        )
        if certificate := kafka.get("ssl.certificate.location"):
            password = kafka.get("ssl.key.password")
            context.load_cert_chain(str(certificate), kafka.get("ssl.key.location"), password)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(
            "ssl.*", f"certificates cannot be read ({type(error).__name__})", "check the paths"
        ) from None
    if str(kafka.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        context.check_hostname = False
    if str(kafka.get("enable.ssl.certificate.verification", "true")).lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def _unusable(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"kafka.{name}", problem, remedy)
