"""Attaches to unmodified diffusers transformers."""

from fodit.models.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
