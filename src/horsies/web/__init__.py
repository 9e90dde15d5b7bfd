"""The dashboard: pages, their live updates, and a JSON API over the same facts.

``create_app`` returns an ASGI application that runs alone or mounted below any path; ``horsies web``
serves one. It needs the extra ``web``.
"""

from horsies.web.access import (
    VERBS,
    Access,
    AllowAll,
    BasicPolicy,
    Policy,
    TokenPolicy,
    TrustedHeader,
    Verb,
    ViewOnly,
    hash_password,
)
from horsies.web.app import create_app, create_monitoring_app

__all__ = [
    "Access",
    "AllowAll",
    "BasicPolicy",
    "Policy",
    "TokenPolicy",
    "TrustedHeader",
    "VERBS",
    "Verb",
    "ViewOnly",
    "create_app",
    "create_monitoring_app",
    "hash_password",
]
