"""What a model takes of memory, found out from its config, on no device and without its weights."""

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.loading import cache_sizes, resolve_limits
from tpu_tgi_server.model import sizes
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.files import OnFile, find_model_files
from tpu_tgi_server.model.loading import DTYPES
from tpu_tgi_server.model.probe import layers_to_serve
from tpu_tgi_server.runtime.parallel import ModelNeeds


def model_needs(settings: Settings, on_file: OnFile) -> ModelNeeds:
    """Fetch the model if it is on the hub, and measure it.

    Args:
        settings: with a dtype that is not `auto` any more.
        on_file: called for each file that is fetched.

    Raises:
        OSError, ValueError: as `load_generator`.
    """
    files = find_model_files(settings, on_file)
    config = load_config(files.folder, settings.trust_remote_code)
    limits = resolve_limits(settings, config.get_text_config())
    model_class, config = find_model_class(config, files.folder, settings.trust_remote_code)
    layers = layers_to_serve(model_class, config, files.folder)
    dtype = DTYPES[settings.dtype]
    return ModelNeeds(
        weight_bytes=sizes.weight_bytes(model_class, config, dtype, settings.quantize),
        slot_bytes=sizes.slot_bytes(layers, dtype, cache_sizes(settings, limits)),
    )
