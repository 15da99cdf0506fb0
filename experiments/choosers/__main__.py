try:
    from .cli import app
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install 'sparse-flash[all,transformers]'") from error

app()
