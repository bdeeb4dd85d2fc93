"""The single declaration of every option, and what is made of it: checks, JSON Schema, reference.

An option is one field of `GatewayConfig`: its name, type, range, default, unit and one line of
documentation. `load` reads TOML, environment and `--set`, and refuses whatever the declaration does
not allow with a message that names the key, what is wrong and what would be right. `schema` and
`reference` print the same declaration for machines and for people.

It opens no socket, reads none of the files that options name but certificates, and does not build
the gateway: that is `pointsman.app`.
"""

from pointsman.config.certificates import Tls, tls_files
from pointsman.config.checks import servable
from pointsman.config.engines import EngineOptions
from pointsman.config.loading import load
from pointsman.config.options import Config, GatewayConfig, changed_options
from pointsman.config.printing import reference, schema
from pointsman.config.sources import DnsSource, KubernetesSource, SourceOptions, WorkerFile
from pointsman.config.tables import LearnedAcceptor, Mount, TokenizerFile
from pointsman.config.values import Address, ConfigError, Unusable
from pointsman.config.workers import StaticWorker

__all__ = [
    "Address",
    "Config",
    "ConfigError",
    "DnsSource",
    "EngineOptions",
    "GatewayConfig",
    "KubernetesSource",
    "LearnedAcceptor",
    "Mount",
    "SourceOptions",
    "StaticWorker",
    "Tls",
    "TokenizerFile",
    "Unusable",
    "WorkerFile",
    "changed_options",
    "load",
    "reference",
    "schema",
    "servable",
    "tls_files",
]
