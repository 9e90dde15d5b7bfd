"""Builds an application's configuration from an object, a URL, or the environment."""

from __future__ import annotations

import os

from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.errors import ConfigurationError, ErrorCode

MIGRATION_VARIABLE = "HORSIES_MIGRATE"


def as_app_config(config: object) -> AppConfig:
    """Return the configuration for ``Horsies(config)``."""
    if isinstance(config, AppConfig):
        return config
    if config is None:
        return AppConfig(broker=PostgresConfig.from_env())
    if isinstance(config, str):
        return AppConfig(broker=PostgresConfig(database_url=config))
    raise ConfigurationError(
        f"Horsies takes an AppConfig or a database URL, not {type(config).__name__}.",
        code=ErrorCode.BROKER_INVALID_URL,
        help_text='Horsies("postgresql://..."), or Horsies(AppConfig(broker=PostgresConfig(...)))',
    )


def environment_migrates() -> bool:
    """Return whether HORSIES_MIGRATE lets this process change the schema; it does by default."""
    value = os.environ.get(MIGRATION_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ConfigurationError(
            f"{MIGRATION_VARIABLE} must be 0 or 1, not {value!r}.",
            code=ErrorCode.CONFIG_INVALID_SCHEMA,
            help_text=f"{MIGRATION_VARIABLE}=0 leaves the schema to `horsies migrate`",
        )
    return value == "1"
