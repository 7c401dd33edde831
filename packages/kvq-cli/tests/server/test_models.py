import openai
import pytest
from scripted_engine import MODEL


def test_the_served_model_is_listed_and_found(client):
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "kvq")
    assert model.max_model_len == 1000
    assert client.models.retrieve(MODEL) == model  # its name holds a slash


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
