/* What bodies of /v1/responses and /v1/messages become as chat requests. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "server/api/agents/translate.h"
#include "server/api/json_fields.h"
#include "tests/unit/api_context.h"

/* A body with single quotes for double ones. */
static char *quoted(const char *body)
{
    char *text = strdup(body);

    for (char *c = text; *c; c++) {
        *c = *c == '\'' ? '"' : *c;
    }
    return text;
}

/* Translate a body; the chat request's JSON, or the error, is left in `ret`. */
static int translate(struct buf *ret, struct completion *c, translate_fn *how, const char *body,
                     struct err *e)
{
    struct api_context ctx = test_context;
    struct translation t = {.c = c, .ctx = &ctx, .e = e};
    char *text = quoted(body);
    cJSON *tree;

    *c = (struct completion){0};
    ctx.defaults(NULL, &c->params);
    assert_int_equal(json_parse(&tree, text, strlen(text), e), 0);
    t.chat = cJSON_CreateObject();
    t.messages = cJSON_AddArrayToObject(t.chat, "messages");
    int rc = how(&t, tree);
    assert_false(t.failed);
    buf_init(ret, 1 << 20);
    json_put(ret, t.chat);
    cJSON_Delete(t.chat);
    cJSON_Delete(tree);
    free(text);
    return rc;
}

static void becomes(translate_fn *how, const char *body, const char *want)
{
    struct completion c;
    struct err e = {0};
    struct buf b;
    char *golden = quoted(want);
    int rc = translate(&b, &c, how, body, &e);

    if (rc) {
        fail_msg("%s: %s", body, e.text);
    }
    assert_string_equal(b.data, golden);
    free(golden);
    buf_release(&b);
    completion_release(&c);
}

static void refused(translate_fn *how, const char *body, const char *param, const char *text)
{
    struct completion c;
    struct err e = {0};
    struct buf b;
    int rc = translate(&b, &c, how, body, &e);

    if (!rc || !strstr(e.text, text)) {
        fail_msg("%s: %d, '%s' lacks '%s'", body, rc, e.text, text);
    }
    assert_string_equal(e.param, param);
    buf_release(&b);
    completion_release(&c);
}

/* A body of n entries, of which as many as a chat may have are translated, and one
 * more: what refuses the chat need not see the others. Returns the messages or calls of
 * it. */
static int translated(translate_fn *how, const char *head, const char *entry, int n,
                      const char *tail, const char *counted)
{
    struct completion c;
    struct err e = {0};
    struct buf b, body;
    int found = 0;

    buf_init(&body, 1 << 22);
    buf_puts(&body, head);
    for (int i = 0; i < n; i++) {
        buf_printf(&body, "%s%s", i ? "," : "", entry);
    }
    buf_puts(&body, tail);
    assert_false(body.failed);
    assert_int_equal(translate(&b, &c, how, body.data, &e), 0);
    for (const char *at = b.data; (at = strstr(at, counted)); at++) {
        found++;
    }
    buf_release(&body);
    buf_release(&b);
    completion_release(&c);
    return found;
}

static void no_more_is_translated_than_a_chat_may_have(void **state)
{
    static const char role[] = "\"role\":", call[] = "\"type\":\"function\"";

    (void)state;
    assert_int_equal(translated(messages_translate, "{'max_tokens':5,'messages':[",
                                "{'role':'user','content':''}", 9000, "]}", role),
                     LIMIT_MESSAGES + 1);
    assert_int_equal(translated(messages_translate,
                                "{'max_tokens':5,'messages':[{'role':'user','content':[",
                                "{'type':'tool_result','tool_use_id':'c'}", 9000, "]}]}", role),
                     LIMIT_MESSAGES + 1);
    assert_int_equal(translated(messages_translate,
                                "{'max_tokens':5,'messages':[{'role':'assistant','content':[",
                                "{'type':'tool_use','id':'c','name':'f'}", 9000, "]}]}", call),
                     LIMIT_TOOL_CALLS + 1);
    assert_int_equal(translated(responses_translate, "{'input':[", "{'role':'user','content':''}",
                                9000, "]}", role),
                     LIMIT_MESSAGES + 1);
    assert_int_equal(translated(responses_translate, "{'input':[",
                                "{'type':'function_call','call_id':'c','name':'f','arguments':''}",
                                9000, "]}", call),
                     LIMIT_TOOL_CALLS + 1);
}

/* ---- messages ---- */

#define M "'max_tokens':5,'messages':"
#define USER_HI "{'role':'user','content':[{'type':'text','text':'hi'}]}"

static void messages_become_a_chat(void **state)
{
    (void)state;
    becomes(messages_translate, "{" M "[{'role':'user','content':'hi'}]}",
            "{'messages':[" USER_HI "]}");
    becomes(messages_translate,
            "{" M "[{'role':'user','content':[{'type':'text','text':'a','cache_control':{'type':"
            "'ephemeral'}},{'type':'text','text':'b'}]}],'system':'Be kind.'}",
            "{'messages':[{'role':'system','content':[{'type':'text','text':'Be kind.'}]},"
            "{'role':'user','content':[{'type':'text','text':'a'},{'type':'text','text':'b'}]}]}");
}

static void a_changing_attribution_header_is_dropped(void **state)
{
    static const char want[] = "{'messages':[{'role':'system','content':[{'type':'text','text':"
                               "'Be kind.'}]}," USER_HI "]}";

    (void)state;
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'}],'system':[{'type':'text','text':"
            "'x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;'},{'type':'text','text':"
            "'Be kind.'}]}",
            want);
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'}],'system':"
            "'x-anthropic-billing-header: cch=77;\\nBe kind.'}",
            want);
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'}],'system':[{'type':'text','text':"
            "'x-anthropic-billing-header: cch=77;'}]}",
            "{'messages':[" USER_HI "]}");
}

static void system_messages_stay_where_they_are(void **state)
{
    (void)state;
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'},{'role':'system','content':'3 tokens left'},"
            "{'role':'assistant','content':'yes'},{'role':'user','content':'hi'}],'system':'S'}",
            "{'messages':[{'role':'system','content':[{'type':'text','text':'S'}]}," USER_HI
            ",{'role':'system','content':[{'type':'text','text':'3 tokens left'}]},"
            "{'role':'assistant','content':[{'type':'text','text':'yes'}]}," USER_HI "]}");
    /* those that begin the conversation are one */
    becomes(messages_translate,
            "{" M "[{'role':'system','content':'T'},{'role':'user','content':'hi'}],'system':'S'}",
            "{'messages':[{'role':'system','content':[{'type':'text','text':'S'},"
            "{'type':'text','text':'T'}]}," USER_HI "]}");
}

static void calls_results_and_thoughts_of_messages(void **state)
{
    (void)state;
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'},{'role':'assistant','content':["
            "{'type':'thinking','thinking':'hm','signature':'s'},"
            "{'type':'redacted_thinking','data':'x'},{'type':'text','text':'Look:'},"
            "{'type':'tool_use','id':'t1','name':'look','input':{'at':[1,2.50]}},"
            "{'type':'tool_use','id':'t2','name':'look','input':{}}]},"
            "{'role':'user','content':[{'type':'text','text':'and'},"
            "{'type':'tool_result','tool_use_id':'t1','content':'sun'},"
            "{'type':'tool_result','tool_use_id':'t2','is_error':true,'content':["
            "{'type':'text','text':'a'},{'type':'text','text':'b'}]},"
            "{'type':'tool_result','tool_use_id':'t3'}]}]}",
            "{'messages':[" USER_HI ",{'role':'assistant','content':[{'type':'text','text':"
            "'Look:'}],'tool_calls':[{'id':'t1','type':'function','function':{'name':'look',"
            "'arguments':'{\\\'at\\\':[1,2.50]}'}},{'id':'t2','type':'function','function':{'name':"
            "'look','arguments':'{}'}}],'reasoning_content':'hm'},"
            "{'role':'tool','tool_call_id':'t1','content':[{'type':'text','text':'sun'}]},"
            "{'role':'tool','tool_call_id':'t2','content':[{'type':'text','text':'a'},"
            "{'type':'text','text':'b'}]},{'role':'tool','tool_call_id':'t3','content':''},"
            "{'role':'user','content':[{'type':'text','text':'and'}]}]}");
    /* calls alone: the content is null */
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'},{'role':'assistant','content':["
            "{'type':'tool_use','id':'t1','name':'look','input':{}}]}]}",
            "{'messages':[" USER_HI ",{'role':'assistant','tool_calls':[{'id':'t1','type':"
            "'function','function':{'name':'look','arguments':'{}'}}],'content':null}]}");
}

static void tools_and_choices_of_messages(void **state)
{
    (void)state;
    becomes(messages_translate,
            "{" M "[{'role':'user','content':'hi'}],'tools':[{'name':'z','description':'d',"
            "'input_schema':{'type':'object'},'cache_control':{'type':'ephemeral'}},"
            "{'type':'web_search_20250305','name':'web_search'},"
            "{'type':'custom','name':'a','input_schema':{},'strict':true}],"
            "'tool_choice':{'type':'any','disable_parallel_tool_use':true}}",
            "{'messages':[" USER_HI "],'tools':[{'type':'function','function':{'name':'z',"
            "'description':'d','parameters':{'type':'object'}}},{'type':'function','function':{"
            "'name':'a','parameters':{},'strict':true}}],'parallel_tool_calls':false,"
            "'tool_choice':'required'}");
    becomes(
        messages_translate,
        "{" M "[{'role':'user','content':'hi'}],'tool_choice':{'type':'tool','name':'f'},"
        "'thinking':{'type':'disabled'},'output_config':{'effort':'low','format':{'type':"
        "'json_schema','schema':{'type':'object'}}},'chat_template_kwargs':{'thinking':1}}",
        "{'messages':[" USER_HI "],'chat_template_kwargs':{'thinking':1,'enable_thinking':"
        "false},'tool_choice':{'type':'function','function':{'name':'f'}},'reasoning_effort':'low',"
        "'response_format':{'type':'json_schema','json_schema':{'name':'answer','schema':{"
        "'type':'object'},'strict':true}}}");
}

/* Tools that Anthropic itself would run, or whose schema it knows: agents send them
 * along. */
static void tools_of_anthropic_are_left_out(void **state)
{
    struct completion c;
    struct err e;
    struct buf b;

    (void)state;
    assert_int_equal(translate(&b, &c, messages_translate,
                               "{" M "[{'role':'user','content':'hi'}],'tools':["
                               "{'type':'web_search_20250305','name':'web_search','max_uses':8},"
                               "{'type':'bash_20250124','name':'bash'},"
                               "{'name':'f','input_schema':{}}],"
                               "'tool_choice':{'type':'tool','name':'web_search'}}",
                               &e),
                     0);
    assert_string_equal(c.ignored, "tools.web_search_20250305, tools.bash_20250124, tool_choice");
    assert_null(strstr(b.data, "tool_choice"));
    assert_non_null(strstr(b.data, "\"name\":\"f\""));
    buf_release(&b);
    completion_release(&c);
}

static void what_messages_refuse(void **state)
{
    translate_fn *how = messages_translate;

    (void)state;
    refused(how, "{'messages':[{'role':'user','content':'hi'}]}", "max_tokens", "is missing");
    refused(how, "{'max_tokens':5}", "messages", "messages is missing");
    refused(how, "{" M "[]}", "messages", "at least one");
    refused(how, "{" M "7}", "messages", "at least one");
    refused(how, "{" M "[7]}", "messages", "messages[0] must be an object");
    refused(how, "{" M "[{'role':'tool','content':'x'}]}", "messages", "role 'tool'");
    refused(how, "{" M "[{'role':'user'}]}", "messages", "messages[0].content must be");
    refused(how, "{" M "[{'role':'user','content':[7]}]}", "messages", "no object with a type");
    refused(how, "{" M "[{'role':'user','content':[{'type':'text'}]}]}", "messages",
            "text block without text");
    refused(how, "{" M "[{'role':'user','content':[{'type':'image','source':{}}]}]}", "messages",
            "of type 'image'");
    refused(how, "{" M "[{'role':'user','content':[{'type':'tool_result','content':'x'}]}]}",
            "messages", "without tool_use_id");
    refused(how,
            "{" M "[{'role':'assistant','content':[{'type':'tool_use','id':'a','name':'b',"
            "'input':[]}]}]}",
            "messages", "input is no object");
    refused(how, "{" M "[{'role':'user','content':'x'}],'system':7}", "system", "not a number");
    refused(how, "{" M "[{'role':'user','content':'x'}],'tools':{}}", "tools", "must be a list");
    refused(how, "{" M "[{'role':'user','content':'x'}],'tools':[7]}", "tools", "tools[0]");
    refused(how, "{" M "[{'role':'user','content':'x'}],'tools':[{'name':'f'}]}", "tools",
            "tools[0].input_schema is missing");
    refused(how,
            "{" M "[{'role':'user','content':'x'}],'tools':[{'type':'bash_20250124','name':'bash'},"
            "{'type':'custom','name':'f','input_schema':null}]}",
            "tools", "tools[1].input_schema is missing");
    refused(how,
            "{" M "[{'role':'user','content':'x'}],'tools':[{'name':'f','input_schema':'{}'}]}",
            "tools", "tools[0].input_schema must be");
    refused(how, "{" M "[{'role':'user','content':'x'}],'tools':[{'input_schema':{}}]}", "tools",
            "tools[0].name is missing");
    refused(how, "{" M "[{'role':'user','content':'x'}],'tool_choice':{'type':'tool'}}",
            "tool_choice", "tool with a name");
    refused(how, "{" M "[{'role':'user','content':'x'}],'thinking':{'type':'x'}}", "thinking",
            "thinking.type");
    refused(how, "{" M "[{'role':'user','content':'x'}],'mcp_servers':[{}]}", "mcp_servers",
            "not supported");
}

/* ---- responses ---- */

static void input_becomes_a_chat(void **state)
{
    translate_fn *how = responses_translate;

    (void)state;
    becomes(how, "{'input':'hi'}", "{'messages':[" USER_HI "]}");
    becomes(how, "{'input':[],'max_output_tokens':1}",
            "{'messages':[{'role':'user','content':''}]}");
    becomes(how,
            "{'instructions':'S','input':[{'type':'message','role':'developer','content':[{'type':"
            "'input_text','text':'D'}]},{'role':'user','content':'hi'},"
            "{'role':'system','content':'3 left'}]}",
            "{'messages':[{'role':'system','content':[{'type':'text','text':'S'},{'type':'text',"
            "'text':'D'}]}," USER_HI ",{'role':'system','content':[{'type':'text','text':'3 left'}"
            "]}]}");
}

static void items_of_one_turn_become_one_message(void **state)
{
    (void)state;
    becomes(responses_translate,
            "{'input':[{'role':'user','content':'hi'},"
            "{'type':'reasoning','id':'rs_1','summary':[],'content':[{'type':'reasoning_text',"
            "'text':'hm'}],'encrypted_content':null},"
            "{'type':'message','role':'assistant','id':'msg_1','status':'completed','content':[{"
            "'type':'output_text','text':'Look:','annotations':[]}]},"
            "{'type':'function_call','id':'fc_1','call_id':'c1','name':'look','arguments':'{}'},"
            "{'type':'function_call','call_id':'c2','name':'look','arguments':'{\\\'a\\\':1}'},"
            "{'type':'function_call_output','call_id':'c1','output':'sun'},"
            "{'type':'function_call_output','call_id':'c2','output':[{'type':'input_text','text':"
            "'rain'}]},"
            "{'type':'reasoning','summary':[{'type':'summary_text','text':'so'}]},"
            "{'type':'function_call','call_id':'c3','name':'look','arguments':'{}'},"
            "{'type':'web_search_call','id':'ws_1','status':'completed'}]}",
            "{'messages':[" USER_HI ",{'role':'assistant','reasoning_content':'hm','content':[{"
            "'type':'text','text':'Look:'}],'tool_calls':[{'id':'c1','type':'function','function':{"
            "'name':'look','arguments':'{}'}},{'id':'c2','type':'function','function':{'name':"
            "'look','arguments':'{\\\'a\\\':1}'}}]},"
            "{'role':'tool','tool_call_id':'c1','content':[{'type':'text','text':'sun'}]},"
            "{'role':'tool','tool_call_id':'c2','content':[{'type':'text','text':'rain'}]},"
            "{'role':'assistant','reasoning_content':'so','tool_calls':[{'id':'c3','type':"
            "'function','function':{'name':'look','arguments':'{}'}}],'content':null}]}");
}

static void tools_and_formats_of_responses(void **state)
{
    (void)state;
    becomes(responses_translate,
            "{'input':'hi','tools':[{'type':'function','name':'z','parameters':{},'strict':false},"
            "{'type':'web_search'},{'type':'function','name':'a','description':'d'}],"
            "'tool_choice':{'type':'function','name':'a'},'parallel_tool_calls':false,"
            "'text':{'format':{'type':'json_schema','name':'n','schema':{'type':'object'},"
            "'strict':true}},'reasoning':{'effort':'none','summary':'auto'}}",
            "{'messages':[" USER_HI "],'parallel_tool_calls':false,'tools':[{'type':'function',"
            "'function':{'name':'z','parameters':{},'strict':false}},{'type':'function','function':"
            "{'name':'a','description':'d'}}],'tool_choice':{'type':'function','function':{'name':"
            "'a'}},'response_format':{'type':'json_schema','json_schema':{'name':'n','schema':{"
            "'type':'object'},'strict':true}},'chat_template_kwargs':{'enable_thinking':false,"
            "'thinking':false},'reasoning_effort':'none'}");
    becomes(responses_translate,
            "{'input':'hi','text':{'format':{'type':'structural_tag','structures':[{'begin':'<a>',"
            "'end':'</a>'}],'triggers':['<a>'],'verbose':1}}}",
            "{'messages':[" USER_HI "],'response_format':{'type':'structural_tag','structures':[{"
            "'begin':'<a>','end':'</a>'}],'triggers':['<a>']}}");
    becomes(responses_translate,
            "{'input':'hi','text':{'format':{'type':'json_object','schema':{'type':'object'}}}}",
            "{'messages':[" USER_HI "],'response_format':{'type':'json_object','schema':{'type':"
            "'object'}}}");
    becomes(responses_translate,
            "{'input':'hi','tools':[{'type':'function','name':'z'},{'type':'function','name':'a'}],"
            "'tool_choice':{'type':'allowed_tools','mode':'required','tools':[{'type':'function',"
            "'name':'a'}]}}",
            "{'messages':[" USER_HI "],'tools':[{'type':'function','function':{'name':'a'}}],"
            "'tool_choice':'required'}");
    becomes(responses_translate,
            "{'input':'hi','include':['x','message.output_text.logprobs'],'top_logprobs':2}",
            "{'messages':[" USER_HI "],'logprobs':true,'top_logprobs':2}");
    becomes(responses_translate, "{'input':'hi','include':['x'],'top_logprobs':2}",
            "{'messages':[" USER_HI "]}");
    becomes(responses_translate,
            "{'input':'hi','text':{'verbosity':'low','format':{'type':'structural_tag',"
            "'structures':[{'begin':'<f>'}],'triggers':['<f']}},'guided_regex':'a'}",
            "{'messages':[" USER_HI "],'verbosity':'low','response_format':{'type':"
            "'structural_tag','structures':[{'begin':'<f>'}],'triggers':['<f']},"
            "'guided_regex':'a'}");
    becomes(responses_translate,
            "{'input':'hi','text':{'format':{'type':'structural_tag','format':{'type':"
            "'triggered_tags'}}},'response_format':{'type':'json_object'}}",
            "{'messages':[" USER_HI "],'response_format':{'type':'structural_tag','format':{"
            "'type':'triggered_tags'}}}");
}

static void what_is_left_out_is_named(void **state)
{
    struct completion c;
    struct err e;
    struct buf b;

    (void)state;
    assert_int_equal(translate(&b, &c, responses_translate,
                               "{'input':[{'type':'local_shell_call','x':1}],'tools':[{'type':"
                               "'web_search'},{'type':'a,b'}],'wrong':1,'tool_choice':{'type':"
                               "'web_search'}}",
                               &e),
                     0);
    assert_string_equal(c.ignored,
                        "wrong, local_shell_call, tools.web_search, tools.a?b, tools.web_search");
    buf_release(&b);
    completion_release(&c);
}

static void what_responses_refuse(void **state)
{
    translate_fn *how = responses_translate;

    (void)state;
    refused(how, "{}", "input", "input is missing");
    refused(how, "{'input':7}", "input", "must be a text or a list");
    refused(how, "{'input':[7]}", "input", "input[0] must be an object");
    refused(how, "{'input':'x','moderation':{'model':'m'}}", "moderation", "not supported");
    refused(how, "{'input':[{'type':7}]}", "input", "input[0] must be an object");
    refused(how, "{'input':[{'content':'x'}]}", "input", "needs a role");
    refused(how, "{'input':[{'role':'tool','content':'x'}]}", "input", "role 'tool'");
    refused(how, "{'input':[{'role':'user'}]}", "input", "input[0].content must be a text");
    refused(how, "{'input':[{'role':'user','content':[{'type':'input_image'}]}]}", "input",
            "of type 'input_image'");
    refused(how, "{'input':[{'role':'user','content':[{'type':'input_text'}]}]}", "input",
            "text part without text");
    refused(how, "{'input':[{'type':'function_call','name':'f'}]}", "input", "needs call_id");
    refused(how, "{'input':[{'type':'function_call_output'}]}", "input", "needs the call_id");
    refused(how, "{'input':[{'type':'item_reference','id':'x'}]}", "input", "stores none");
    refused(how, "{'input':'x','previous_response_id':'resp_1'}", "previous_response_id",
            "stores no responses");
    refused(how, "{'input':'x','background':true}", "background", "not supported");
    refused(how, "{'input':'x','max_output_tokens':0}", "max_output_tokens", "between 1");
    refused(how, "{'input':'x','include':[1]}", "include", "a list of strings");
    refused(how, "{'input':'x','top_logprobs':21}", "top_logprobs", "between 0 and 20");
    refused(how, "{'input':'x','tools':[{'name':'f'}]}", "tools", "tools[0] must be an object");
    refused(how, "{'input':'x','tool_choice':{}}", "tool_choice", "names a function");
    refused(how, "{'input':'x','text':{'format':7}}", "text", "text.format");
    refused(how, "{'input':'x','prompt':{'id':'p'}}", "prompt", "not supported");
}

static void a_response_repeats_the_request(void **state)
{
    static const char *const want[] = {
        "'instructions':'S\\n',",
        "'tools':[{'type':'function','name':'f','description':null,'parameters':{'a':1.50},"
        "'strict':null}],",
        "'tool_choice':'none',",
        "'text':{'verbosity':'low','format':{'type':'text'}},",
        "'reasoning':{'effort':'high','summary':null},",
        "'temperature':0.7,'top_p':1,",
        "'max_output_tokens':7,",
        "'metadata':{'k':'v'},",
        "'store':false,",
        "'previous_response_id':null,",
        "'user':null,"};
    struct completion c;
    struct err e;
    struct buf b;

    (void)state;
    assert_int_equal(
        translate(&b, &c, responses_translate,
                  "{'input':'hi','instructions':'S\\n','store':true,'tools':[{'type':'function',"
                  "'name':'f','parameters':{'a':1.50}},{'type':'web_search'}],'tool_choice':'none',"
                  "'text':{'verbosity':'low'},'reasoning':{'effort':'high'},'temperature':0.7,"
                  "'max_output_tokens':7,'metadata':{'k':'v'}}",
                  &e),
        0);
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        char *text = quoted(want[i]);
        if (!strstr(c.echo, text)) {
            fail_msg("%s lacks %s", c.echo, text);
        }
        free(text);
    }
    buf_release(&b);
    completion_release(&c);
}

static void what_is_too_large_is_not_repeated(void **state)
{
    enum { LARGE = 200 * 1024 };
    struct completion c;
    struct err e;
    struct buf b, body;

    (void)state;
    buf_init(&body, 1 << 20);
    buf_puts(&body, "{'input':'hi','metadata':{'k':'v'},'instructions':'");
    for (int i = 0; i < LARGE; i++) {
        buf_putc(&body, 'x');
    }
    buf_puts(&body, "'}");
    assert_int_equal(translate(&b, &c, responses_translate, body.data, &e), 0);
    assert_non_null(strstr(c.echo, "\"instructions\":null,\"tools\":[],"));
    assert_non_null(strstr(c.echo, "\"metadata\":{\"k\":\"v\"}"));
    assert_true(b.len > LARGE); /* the model gets them nevertheless */
    buf_release(&b);
    buf_release(&body);
    completion_release(&c);
}

/* ---- the whole way ---- */

static int parse(struct completion *c, enum api_kind api, const struct api_context *ctx,
                 const char *body, struct err *e)
{
    char *text = quoted(body);
    int rc =
        (api == API_MESSAGES ? messages_parse : responses_parse)(c, text, strlen(text), ctx, e);

    free(text);
    return rc;
}

static int render_plainly(void *arg, const char *context, size_t len, struct buf *out,
                          struct err *e)
{
    (void)arg, (void)e;
    return buf_append(out, context, len);
}

static void more_tokens_than_fit_are_cut_to_what_fits(void **state)
{
    struct api_context ctx = test_context;
    struct completion c;
    struct err e;

    (void)state;
    ctx.render_chat = render_plainly;
    assert_int_equal(parse(&c, API_MESSAGES, &ctx,
                           "{'max_tokens':32000,'messages':[{'role':'user','content':'hi'}]}", &e),
                     0);
    assert_int_equal(c.params.max_tokens, ctx.info.max_model_len - c.prompt[0].n);
    completion_release(&c);
    assert_int_equal(parse(&c, API_RESPONSES, &ctx, "{'input':'hi','max_output_tokens':3}", &e), 0);
    assert_int_equal(c.params.max_tokens, 3);
    completion_release(&c);
}

/* A template that takes system messages only at the beginning. */
static int render_strictly(void *arg, const char *context, size_t len, struct buf *out,
                           struct err *e)
{
    const char *behind = strstr(context, "},{\"role\":\"system\"");

    (void)arg;
    if (behind || (strstr(context, "{\"role\":\"system\"") && strstr(context, "never"))) {
        return err_set(e, ERR_INVALID, "System message must be at the beginning.");
    }
    return buf_append(out, context, len);
}

static void system_messages_that_the_template_refuses_become_marked_user_turns(void **state)
{
    struct api_context ctx = test_context;
    struct completion c;
    struct err e;

    (void)state;
    ctx.render_chat = render_strictly;
    ctx.info.max_model_len = 4000;
    assert_int_equal(
        parse(&c, API_RESPONSES, &ctx,
              "{'instructions':'S','input':[{'role':'user','content':'a'},{'role':'assistant',"
              "'content':'b'},{'role':'system','content':'3 left'},{'role':'user','content':'c'},"
              "{'role':'system','content':'2 left'}]}",
              &e),
        0);
    char *text = calloc(1, (size_t)c.prompt[0].n + 1);
    for (int32_t i = 0; i < c.prompt[0].n; i++) {
        text[i] = (char)c.prompt[0].id[i];
    }
    assert_non_null(strstr(text, "{\"role\":\"system\",\"content\":\"S\"}"));
    assert_non_null(strstr(text, "\"content\":\"<system-reminder>\\n3 left\\n</system-reminder>\\nc"
                                 "\\n<system-reminder>\\n2 left\\n</system-reminder>\"}]"));
    free(text);
    completion_release(&c);
    /* nor at the beginning */
    assert_int_equal(parse(&c, API_RESPONSES, &ctx, "{'instructions':'never','input':'hi'}", &e),
                     0);
    completion_release(&c);
}

static void prompts_are_counted(void **state)
{
    struct api_context ctx = test_context;
    char ignored[256];
    struct err e;
    int32_t n = 0;

    (void)state;
    ctx.render_chat = render_plainly;
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"x\":1}";
    assert_int_equal(count_parse(API_MESSAGES, &n, ignored, body, strlen(body), &ctx, &e), 0);
    assert_true(n > 2);
    assert_string_equal(ignored, "x");
    static const char bad[] = "{\"input\":[{\"role\":\"user\",\"content\":7}]}";
    assert_int_equal(count_parse(API_RESPONSES, &n, ignored, bad, strlen(bad), &ctx, &e),
                     ERR_INVALID);
    assert_string_equal(e.param, "input");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_become_a_chat),
        cmocka_unit_test(a_changing_attribution_header_is_dropped),
        cmocka_unit_test(system_messages_stay_where_they_are),
        cmocka_unit_test(calls_results_and_thoughts_of_messages),
        cmocka_unit_test(tools_and_choices_of_messages),
        cmocka_unit_test(tools_of_anthropic_are_left_out),
        cmocka_unit_test(what_messages_refuse),
        cmocka_unit_test(input_becomes_a_chat),
        cmocka_unit_test(items_of_one_turn_become_one_message),
        cmocka_unit_test(tools_and_formats_of_responses),
        cmocka_unit_test(what_is_left_out_is_named),
        cmocka_unit_test(what_responses_refuse),
        cmocka_unit_test(a_response_repeats_the_request),
        cmocka_unit_test(what_is_too_large_is_not_repeated),
        cmocka_unit_test(more_tokens_than_fit_are_cut_to_what_fits),
        cmocka_unit_test(system_messages_that_the_template_refuses_become_marked_user_turns),
        cmocka_unit_test(prompts_are_counted),
        cmocka_unit_test(no_more_is_translated_than_a_chat_may_have),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
