"""What Kubernetes takes: the versions whose schemas manifests are held to, and those of resources that are not its own."""

from __future__ import annotations

import functools
import json

import kubernetes_validate
from kubernetes_validate import utils as kubernetes_utils

from tests.deploy.chart import HERE

KUBERNETES = kubernetes_validate.utils.all_versions()[-2:]
CRDS = {file.stem: json.loads(file.read_text()) for file in (HERE / "crds").glob("*.json")}

# Its schemas are some MB, and it would read them anew for each manifest.
kubernetes_utils.schema_contents = functools.cache(kubernetes_utils.schema_contents)
