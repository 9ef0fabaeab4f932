"""What setup.cfg can't say: the links that follow from its one address, and the README as a package page shows it."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

BRANCH = "main"


def links(address: str) -> dict[str, str]:
    """Those of the package page, none until there is an address."""
    if not address:
        return {}
    return {
        "Homepage": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/{BRANCH}/CHANGELOG.md",
        "Support table": f"{address}/blob/{BRANCH}/docs/start/support.md",
    }


def page(text: str, address: str) -> str:
    """The README with absolute links and images, or as it is until there is an address."""
    if not address:
        return text
    text = re.sub(r"(!\[[^\]]*\]\(|\bsrc(?:set)?=\")(?!\w+:|#)", rf"\g<1>{address}/raw/{BRANCH}/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\(|\bhref=\")(?!\w+:|#)", rf"\g<1>{address}/blob/{BRANCH}/", text)


def main() -> None:
    root = Path(__file__).parent
    config = ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    address = config["insum_ops"]["address"].strip().rstrip("/")
    readme = (root / "README.md").read_text(encoding="utf-8")
    setup(project_urls=links(address), long_description=page(readme, address))


if __name__ == "__main__":
    main()
