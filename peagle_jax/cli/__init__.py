"""The command line `peagle-jax`; it has no logic of its own."""

import os

import click

from peagle_jax.cli.generate import generate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="peagle-jax")
def main() -> None:
    """Lossless P-EAGLE speculative decoding in JAX."""
    # transformers warns on import that there is no torch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


main.add_command(generate)
