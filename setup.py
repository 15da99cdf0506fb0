"""The metadata that depends on where the repository is: with REPOSITORY_URL set, its links, and those of README, which PyPI shows
outside of the repository. pyproject.toml has the rest."""

import os
import re
from pathlib import Path

from setuptools import setup

text, url = Path(__file__).with_name("README.md").read_text(), os.environ.get("REPOSITORY_URL", "").rstrip("/")
links = {}
if url:
    picture = r'((?:!\[[^]]*\]\(|src(?:set)?="))(?!https?:)'
    text = re.sub(picture, rf"\g<1>{url}/raw/main/", text)
    text = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{url}/blob/main/", text)
    links = {"Repository": url, "Changelog": f"{url}/blob/main/CHANGELOG.md", "Documentation": f"{url}/blob/main/docs/index.md"}
setup(long_description=text, long_description_content_type="text/markdown", project_urls=links)
