"""The schemas of TPC-DS: its 24 tables with the names of the specification, and their primary keys.

Key columns are never NULL; all others may be, as in the benchmark's data.
"""

from __future__ import annotations

from typing import Final

from actors.model.plan.schema import TableColumn, TableSchema

_KINDS: Final = {
    "money": "decimal(7,2)",
    "rate": "decimal(5,2)",
    "text": "string",
    "wide": "decimal(15,2)",
}


def _schema(key: str, text: str) -> TableSchema:
    columns = [part.split() for part in text.split(",")]
    keys = tuple(key.split())
    made = tuple(
        TableColumn(name, _KINDS.get(kind, kind), name not in keys) for name, kind in columns
    )
    return TableSchema(made, keys)


SCHEMAS: Final[dict[str, TableSchema]] = {
    "call_center": _schema(
        "cc_call_center_sk",
        "cc_call_center_sk int, cc_call_center_id text, cc_rec_start_date date, cc_rec_end_date "
        "date, cc_closed_date_sk int, cc_open_date_sk int, cc_name text, cc_class text, "
        "cc_employees int, cc_sq_ft int, cc_hours text, cc_manager text, cc_mkt_id int, "
        "cc_mkt_class text, cc_mkt_desc text, cc_market_manager text, cc_division int, "
        "cc_division_name text, cc_company int, cc_company_name text, cc_street_number text, "
        "cc_street_name text, cc_street_type text, cc_suite_number text, cc_city text, cc_county "
        "text, cc_state text, cc_zip text, cc_country text, cc_gmt_offset rate, cc_tax_percentage "
        "rate",
    ),
    "catalog_page": _schema(
        "cp_catalog_page_sk",
        "cp_catalog_page_sk int, cp_catalog_page_id text, cp_start_date_sk int, cp_end_date_sk "
        "int, cp_department text, cp_catalog_number int, cp_catalog_page_number int, "
        "cp_description text, cp_type text",
    ),
    "catalog_returns": _schema(
        "cr_item_sk cr_order_number",
        "cr_returned_date_sk int, cr_returned_time_sk int, cr_item_sk int, "
        "cr_refunded_customer_sk int, cr_refunded_cdemo_sk int, cr_refunded_hdemo_sk int, "
        "cr_refunded_addr_sk int, cr_returning_customer_sk int, cr_returning_cdemo_sk int, "
        "cr_returning_hdemo_sk int, cr_returning_addr_sk int, cr_call_center_sk int, "
        "cr_catalog_page_sk int, cr_ship_mode_sk int, cr_warehouse_sk int, cr_reason_sk int, "
        "cr_order_number bigint, cr_return_quantity int, cr_return_amount money, cr_return_tax "
        "money, cr_return_amt_inc_tax money, cr_fee money, cr_return_ship_cost money, "
        "cr_refunded_cash money, cr_reversed_charge money, cr_store_credit money, cr_net_loss "
        "money",
    ),
    "catalog_sales": _schema(
        "cs_item_sk cs_order_number",
        "cs_sold_date_sk int, cs_sold_time_sk int, cs_ship_date_sk int, cs_bill_customer_sk int, "
        "cs_bill_cdemo_sk int, cs_bill_hdemo_sk int, cs_bill_addr_sk int, cs_ship_customer_sk "
        "int, cs_ship_cdemo_sk int, cs_ship_hdemo_sk int, cs_ship_addr_sk int, cs_call_center_sk "
        "int, cs_catalog_page_sk int, cs_ship_mode_sk int, cs_warehouse_sk int, cs_item_sk int, "
        "cs_promo_sk int, cs_order_number bigint, cs_quantity int, cs_wholesale_cost money, "
        "cs_list_price money, cs_sales_price money, cs_ext_discount_amt money, cs_ext_sales_price "
        "money, cs_ext_wholesale_cost money, cs_ext_list_price money, cs_ext_tax money, "
        "cs_coupon_amt money, cs_ext_ship_cost money, cs_net_paid money, cs_net_paid_inc_tax "
        "money, cs_net_paid_inc_ship money, cs_net_paid_inc_ship_tax money, cs_net_profit money",
    ),
    "customer": _schema(
        "c_customer_sk",
        "c_customer_sk int, c_customer_id text, c_current_cdemo_sk int, c_current_hdemo_sk int, "
        "c_current_addr_sk int, c_first_shipto_date_sk int, c_first_sales_date_sk int, "
        "c_salutation text, c_first_name text, c_last_name text, c_preferred_cust_flag text, "
        "c_birth_day int, c_birth_month int, c_birth_year int, c_birth_country text, c_login "
        "text, c_email_address text, c_last_review_date_sk int",
    ),
    "customer_address": _schema(
        "ca_address_sk",
        "ca_address_sk int, ca_address_id text, ca_street_number text, ca_street_name text, "
        "ca_street_type text, ca_suite_number text, ca_city text, ca_county text, ca_state text, "
        "ca_zip text, ca_country text, ca_gmt_offset rate, ca_location_type text",
    ),
    "customer_demographics": _schema(
        "cd_demo_sk",
        "cd_demo_sk int, cd_gender text, cd_marital_status text, cd_education_status text, "
        "cd_purchase_estimate int, cd_credit_rating text, cd_dep_count int, cd_dep_employed_count "
        "int, cd_dep_college_count int",
    ),
    "date_dim": _schema(
        "d_date_sk",
        "d_date_sk int, d_date_id text, d_date date, d_month_seq int, d_week_seq int, "
        "d_quarter_seq int, d_year int, d_dow int, d_moy int, d_dom int, d_qoy int, d_fy_year "
        "int, d_fy_quarter_seq int, d_fy_week_seq int, d_day_name text, d_quarter_name text, "
        "d_holiday text, d_weekend text, d_following_holiday text, d_first_dom int, d_last_dom "
        "int, d_same_day_ly int, d_same_day_lq int, d_current_day text, d_current_week text, "
        "d_current_month text, d_current_quarter text, d_current_year text",
    ),
    "household_demographics": _schema(
        "hd_demo_sk",
        "hd_demo_sk int, hd_income_band_sk int, hd_buy_potential text, hd_dep_count int, "
        "hd_vehicle_count int",
    ),
    "income_band": _schema(
        "ib_income_band_sk",
        "ib_income_band_sk int, ib_lower_bound int, ib_upper_bound int",
    ),
    "inventory": _schema(
        "inv_date_sk inv_item_sk inv_warehouse_sk",
        "inv_date_sk int, inv_item_sk int, inv_warehouse_sk int, inv_quantity_on_hand int",
    ),
    "item": _schema(
        "i_item_sk",
        "i_item_sk int, i_item_id text, i_rec_start_date date, i_rec_end_date date, i_item_desc "
        "text, i_current_price money, i_wholesale_cost money, i_brand_id int, i_brand text, "
        "i_class_id int, i_class text, i_category_id int, i_category text, i_manufact_id int, "
        "i_manufact text, i_size text, i_formulation text, i_color text, i_units text, "
        "i_container text, i_manager_id int, i_product_name text",
    ),
    "promotion": _schema(
        "p_promo_sk",
        "p_promo_sk int, p_promo_id text, p_start_date_sk int, p_end_date_sk int, p_item_sk int, "
        "p_cost wide, p_response_target int, p_promo_name text, p_channel_dmail text, "
        "p_channel_email text, p_channel_catalog text, p_channel_tv text, p_channel_radio text, "
        "p_channel_press text, p_channel_event text, p_channel_demo text, p_channel_details text, "
        "p_purpose text, p_discount_active text",
    ),
    "reason": _schema(
        "r_reason_sk",
        "r_reason_sk int, r_reason_id text, r_reason_desc text",
    ),
    "ship_mode": _schema(
        "sm_ship_mode_sk",
        "sm_ship_mode_sk int, sm_ship_mode_id text, sm_type text, sm_code text, sm_carrier text, "
        "sm_contract text",
    ),
    "store": _schema(
        "s_store_sk",
        "s_store_sk int, s_store_id text, s_rec_start_date date, s_rec_end_date date, "
        "s_closed_date_sk int, s_store_name text, s_number_employees int, s_floor_space int, "
        "s_hours text, s_manager text, s_market_id int, s_geography_class text, s_market_desc "
        "text, s_market_manager text, s_division_id int, s_division_name text, s_company_id int, "
        "s_company_name text, s_street_number text, s_street_name text, s_street_type text, "
        "s_suite_number text, s_city text, s_county text, s_state text, s_zip text, s_country "
        "text, s_gmt_offset rate, s_tax_precentage rate",
    ),
    "store_returns": _schema(
        "sr_item_sk sr_ticket_number",
        "sr_returned_date_sk int, sr_return_time_sk int, sr_item_sk int, sr_customer_sk int, "
        "sr_cdemo_sk int, sr_hdemo_sk int, sr_addr_sk int, sr_store_sk int, sr_reason_sk int, "
        "sr_ticket_number bigint, sr_return_quantity int, sr_return_amt money, sr_return_tax "
        "money, sr_return_amt_inc_tax money, sr_fee money, sr_return_ship_cost money, "
        "sr_refunded_cash money, sr_reversed_charge money, sr_store_credit money, sr_net_loss "
        "money",
    ),
    "store_sales": _schema(
        "ss_item_sk ss_ticket_number",
        "ss_sold_date_sk int, ss_sold_time_sk int, ss_item_sk int, ss_customer_sk int, "
        "ss_cdemo_sk int, ss_hdemo_sk int, ss_addr_sk int, ss_store_sk int, ss_promo_sk int, "
        "ss_ticket_number bigint, ss_quantity int, ss_wholesale_cost money, ss_list_price money, "
        "ss_sales_price money, ss_ext_discount_amt money, ss_ext_sales_price money, "
        "ss_ext_wholesale_cost money, ss_ext_list_price money, ss_ext_tax money, ss_coupon_amt "
        "money, ss_net_paid money, ss_net_paid_inc_tax money, ss_net_profit money",
    ),
    "time_dim": _schema(
        "t_time_sk",
        "t_time_sk int, t_time_id text, t_time int, t_hour int, t_minute int, t_second int, "
        "t_am_pm text, t_shift text, t_sub_shift text, t_meal_time text",
    ),
    "warehouse": _schema(
        "w_warehouse_sk",
        "w_warehouse_sk int, w_warehouse_id text, w_warehouse_name text, w_warehouse_sq_ft int, "
        "w_street_number text, w_street_name text, w_street_type text, w_suite_number text, "
        "w_city text, w_county text, w_state text, w_zip text, w_country text, w_gmt_offset rate",
    ),
    "web_page": _schema(
        "wp_web_page_sk",
        "wp_web_page_sk int, wp_web_page_id text, wp_rec_start_date date, wp_rec_end_date date, "
        "wp_creation_date_sk int, wp_access_date_sk int, wp_autogen_flag text, wp_customer_sk "
        "int, wp_url text, wp_type text, wp_char_count int, wp_link_count int, wp_image_count "
        "int, wp_max_ad_count int",
    ),
    "web_returns": _schema(
        "wr_item_sk wr_order_number",
        "wr_returned_date_sk int, wr_returned_time_sk int, wr_item_sk int, "
        "wr_refunded_customer_sk int, wr_refunded_cdemo_sk int, wr_refunded_hdemo_sk int, "
        "wr_refunded_addr_sk int, wr_returning_customer_sk int, wr_returning_cdemo_sk int, "
        "wr_returning_hdemo_sk int, wr_returning_addr_sk int, wr_web_page_sk int, wr_reason_sk "
        "int, wr_order_number bigint, wr_return_quantity int, wr_return_amt money, wr_return_tax "
        "money, wr_return_amt_inc_tax money, wr_fee money, wr_return_ship_cost money, "
        "wr_refunded_cash money, wr_reversed_charge money, wr_account_credit money, wr_net_loss "
        "money",
    ),
    "web_sales": _schema(
        "ws_item_sk ws_order_number",
        "ws_sold_date_sk int, ws_sold_time_sk int, ws_ship_date_sk int, ws_item_sk int, "
        "ws_bill_customer_sk int, ws_bill_cdemo_sk int, ws_bill_hdemo_sk int, ws_bill_addr_sk "
        "int, ws_ship_customer_sk int, ws_ship_cdemo_sk int, ws_ship_hdemo_sk int, "
        "ws_ship_addr_sk int, ws_web_page_sk int, ws_web_site_sk int, ws_ship_mode_sk int, "
        "ws_warehouse_sk int, ws_promo_sk int, ws_order_number bigint, ws_quantity int, "
        "ws_wholesale_cost money, ws_list_price money, ws_sales_price money, ws_ext_discount_amt "
        "money, ws_ext_sales_price money, ws_ext_wholesale_cost money, ws_ext_list_price money, "
        "ws_ext_tax money, ws_coupon_amt money, ws_ext_ship_cost money, ws_net_paid money, "
        "ws_net_paid_inc_tax money, ws_net_paid_inc_ship money, ws_net_paid_inc_ship_tax money, "
        "ws_net_profit money",
    ),
    "web_site": _schema(
        "web_site_sk",
        "web_site_sk int, web_site_id text, web_rec_start_date date, web_rec_end_date date, "
        "web_name text, web_open_date_sk int, web_close_date_sk int, web_class text, web_manager "
        "text, web_mkt_id int, web_mkt_class text, web_mkt_desc text, web_market_manager text, "
        "web_company_id int, web_company_name text, web_street_number text, web_street_name text, "
        "web_street_type text, web_suite_number text, web_city text, web_county text, web_state "
        "text, web_zip text, web_country text, web_gmt_offset rate, web_tax_percentage rate",
    ),
}
"""The schema of each table."""
