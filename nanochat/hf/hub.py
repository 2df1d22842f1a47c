"""
A model folder that is sent to Hugging Face's hub, or to one that $HF_ENDPOINT names.
"""
import contextlib
import os

from nanochat.common import BadInput, one_line


@contextlib.contextmanager
def asking_hub(name: str, advice: str = ""):
    """Around what asks the hub. Raises BadInput, one line with the advice at its end, for all that goes wrong there."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # of many types: the library behind huggingface_hub changes with its version
        cause = f" ({one_line(error.__cause__)[:200]})" if error.__cause__ else ""
        raise BadInput(f"--push {name}: {type(error).__name__}: {one_line(error)[:300]}{cause}{advice}") from None


def check_repo_name(name: str) -> None:
    """Raises BadInput unless a model on the hub can be called so."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id
    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError("must be owner/name")
    except HFValidationError as error:
        raise BadInput(f"--push {name}: {one_line(error)}") from None


def claim_repo(name: str) -> str:
    """Makes the model on the hub, empty and private, unless it is there and empty. -> its address. Raises BadInput for
    one that has files, and where the hub cannot be asked or does not let us."""
    import huggingface_hub
    if huggingface_hub.get_token() is None:
        raise BadInput(f"--push {name}: there is no token: run `hf auth login`, or set HF_TOKEN")
    with asking_hub(name):
        hub = huggingface_hub.HfApi()
        hub.whoami()
        address = hub.create_repo(name, private=True, exist_ok=True)
        files = sorted(file for file in hub.list_repo_files(name) if file != ".gitattributes")
    if files:
        raise BadInput(f"--push {name}: {address} holds {len(files)} files, such as {files[0]}: take another name")
    return str(address)


def push_folder(folder: str, name: str) -> int:
    """Sends the files of a folder as one commit. -> their bytes. Raises BadInput."""
    import huggingface_hub
    files = {file: os.path.join(folder, file) for file in sorted(os.listdir(folder))}
    with asking_hub(name, f"; {folder} is whole: send it with `hf upload {name} {folder}`"):
        added = [huggingface_hub.CommitOperationAdd(file, path) for file, path in files.items()]
        huggingface_hub.HfApi().create_commit(name, added, commit_message="Export of nanochat-tango")
    return sum(map(os.path.getsize, files.values()))
