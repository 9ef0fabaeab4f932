"""What setup.cfg can't say: the links that follow from its one address, the README as a package page shows it, and
what an editable install tells type checkers."""

import base64
import hashlib
import re
import shutil
import zipfile
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

BRANCH = "main"
ROOT = Path(__file__).resolve().parent
LINKED = ROOT / "build" / "editable"


class TypedEditableWheel(editable_wheel):
    """An editable install that type checkers can read.

    setuptools' own maps insum_ops.formats to formats/ with code that runs when Python starts. Type checkers run none:
    they look into the folders that .pth files list. So one more is listed, with links to all parts of the package.
    Python imports from there too, and by setuptools' way what is not there.
    """

    def run(self) -> None:
        super().run()
        if link_parts():
            (path,) = Path(self.dist_dir).glob("*.editable-*.whl")
            add_file(path, "insum_ops-editable.pth", f"{LINKED}\n".encode())


def link_parts() -> bool:
    """Make LINKED/insum_ops, with a link to each part of the package; return whether this system has links."""
    shutil.rmtree(LINKED, ignore_errors=True)
    package = LINKED / "insum_ops"
    package.mkdir(parents=True)
    parts = [part for part in (ROOT / "insum_ops").iterdir() if part.name != "__pycache__"]
    try:
        for part in (*parts, ROOT / "formats", ROOT / "compiler"):
            (package / part.name).symlink_to(part, target_is_directory=part.is_dir())
    except OSError:  # Windows asks for a right
        shutil.rmtree(LINKED)
        return False
    return True


def add_file(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel, and to the wheel's record of its files."""
    with zipfile.ZipFile(wheel) as before:
        files = {info: before.read(info) for info in before.infolist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as after:
        after.writestr(name, content)
        for info, text in files.items():
            if info.filename.endswith(".dist-info/RECORD"):
                text = f"{name},sha256={digest},{len(content)}\n".encode() + text
            after.writestr(info, text)


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
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    address = config["insum_ops"]["address"].strip().rstrip("/")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        project_urls=links(address),
        long_description=page(readme, address),
        cmdclass={"editable_wheel": TypedEditableWheel},
    )


if __name__ == "__main__":
    main()
