"""Shape annotations: jaxtyping's where it is installed (tests check them), plain tensors in a bare installation."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class Float:
            """Stand-in: `Float[Tensor, "L d"]` is `Tensor`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Int = Float

__all__ = ["Bool", "Float", "Int"]
