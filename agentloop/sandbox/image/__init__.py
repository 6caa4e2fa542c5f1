"""The image that containers start from: Python with numpy and sympy, and nothing of ours.

The worker's source travels in the container's command, so an image is never stale. Its tag is a
hash of the recipe: another recipe, another image.
"""

from agentloop.sandbox.image.build import (
    IMAGE_NAME,
    build_image,
    ensure_image,
    has_image,
    image_tag,
)

__all__ = ["IMAGE_NAME", "build_image", "ensure_image", "has_image", "image_tag"]
