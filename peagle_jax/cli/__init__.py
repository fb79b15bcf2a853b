"""The command line `peagle-jax`; it has no logic of its own."""

import click

from peagle_jax.cli.chat import chat
from peagle_jax.cli.data import data
from peagle_jax.cli.generate import generate
from peagle_jax.cli.plan import plan
from peagle_jax.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="peagle-jax")
def main() -> None:
    """Lossless P-EAGLE speculative decoding in JAX."""


main.add_command(chat)
main.add_command(data)
main.add_command(generate)
main.add_command(plan)
main.add_command(train)
