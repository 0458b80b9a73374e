"""moegemm as an experts implementation of Hugging Face transformers.

After this import `from_pretrained(name, experts_implementation="moegemm")` makes a model whose experts run on
moegemm. For a model that is there already, `moegemm.patch(model)`. Routers and attention are left alone.
"""

from moegemm.integrations.expert_modules.experts import experts_forward
from moegemm.integrations.patching import patch, unpatch
from moegemm.integrations.peft_adapters import NAME
from moegemm.integrations.registration import register
from moegemm.integrations.reporting import report

__all__ = ["NAME", "experts_forward", "patch", "register", "report", "unpatch"]

register()
