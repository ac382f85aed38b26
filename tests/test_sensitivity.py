from dataclasses import fields

from curvature_gap.architecture import Architecture
from curvature_gap.sensitivity import variants

MNIST = Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=16, d_ff=64)


def test_each_variant_changes_one_thing():
    pinned, *others = variants(MNIST, 128, 0)
    assert pinned.architecture == MNIST
    names = [variant.name for variant in others]
    assert len(set(names)) == len(names)
    assert {"positions_none", "positions_learned", "pixels_0_to_1", "batch_32", "bias", "no_output_projection"} <= set(
        names
    )
    for variant in others:
        changed = [f.name for f in fields(variant) if getattr(variant, f.name) != getattr(pinned, f.name)]
        assert len(changed) == 2, variant  # the name and one more
        if "architecture" in changed:
            keys = [f.name for f in fields(MNIST) if getattr(variant.architecture, f.name) != getattr(MNIST, f.name)]
            assert len(keys) == 1, variant
